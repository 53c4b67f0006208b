from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.drafting.__main__ import MODELLED_K, QUICK, calibrated, case_rows, generated, modelled, recorded
from benchmarks.drafting.baselines.histospec import HistoSpecPaper
from benchmarks.drafting.costs import ModelledEngine, attach_row, forward_s, load, propose_rows
from benchmarks.drafting.goals import LOWER, goals, recorded_goals
from benchmarks.drafting.quality import (
    ARCTIC,
    ARCTIC_BEST,
    ARCTIC_ONE_TREE,
    OURS,
    OURS_ALL,
    PAPER,
    PAPER_K,
    RELEASED,
    SUFFIX_K,
    Contestant,
    K,
    contestants,
    decode_visits,
    ours,
    visits,
)
from benchmarks.drafting.trace_sets import CASES, OTHER_CASES
from benchmarks.drafting.traces import generate
from benchmarks.harness.record import Row
from history.store.traces import write_traces
from tests.benchmarks.drafting.test_replay import Counting
from tests.support.traces import trace

TINY = replace(QUICK, lengths={"2k": (200, 1)}, modelled_batches=(2,), modelled_tokens=100, seeds=(1,))


def field(tmp_path: Path) -> list[Contestant]:
    return [
        Contestant(name=OURS, make=lambda: ours(tmp_path)),
        Contestant(name=PAPER, make=HistoSpecPaper, max_draft_tokens=PAPER_K),
    ]


def test_visits_are_counted_per_prompt_independently_of_steps() -> None:
    a = [replace(trace([step]), step=step, prompt_id="a") for step in (0, 3)]
    b = [replace(trace([step]), step=step, prompt_id="b") for step in (7, 1, 5)]
    found = [[(one.prompt_id, one.step) for one in visit] for visit in visits([*b, *a])]
    assert found == [[("a", 0), ("b", 1)], [("a", 3), ("b", 5)], [("b", 7)]]


def test_a_method_remembers_each_visit_before_the_next(tmp_path: Path) -> None:
    old = [trace(range(1, 60), step=step) for step in (0, 1)]
    paper = field(tmp_path)[1]
    cold, warm = decode_visits(paper, [[old[0]], [old[1]]])
    assert (cold.num_drafted, warm.tokens_per_forward > 4) == (0, True)
    (later,) = decode_visits(paper, [[old[0]], [old[1]]], first=1)
    assert later == warm


def test_recorded_traces_are_read_from_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for step in range(3):
        write_traces(folder / f"step-{step}.jsonl", [trace(range(1, 60), step=step)])
    work = tmp_path / "work"
    work.mkdir()
    rows = list(recorded(field(work), folder))
    assert [(row["method"], row["visit"]) for row in rows] == [(m, v) for m in (OURS, PAPER) for v in range(3)]
    (goal,) = recorded_goals(rows)
    assert goal.name == "recorded: over the best peer"


def test_a_folder_without_traces_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} holds no traces"):
        list(recorded(field(tmp_path), tmp_path))


def test_the_best_setting_on_other_responses_is_the_peer(tmp_path: Path) -> None:
    """Settings that look one and three tokens ahead; the third is not a setting of Arctic."""
    field = [
        Contestant(name=name, make=lambda length=length: Counting(length))
        for name, length in ((ARCTIC, 1), ("Arctic, factor 4", 3), (PAPER, 9))
    ]
    epochs = [[trace(range(1, 40), step=step)] for step in (0, 1)]
    calibration = calibrated(field, CASES[0], epochs)
    rows = []
    while True:
        try:
            rows.append(next(calibration))
        except StopIteration as stop:
            chosen = stop.value
            break
    assert chosen == {0: "Arctic, factor 4", 1: "Arctic, factor 4"}
    assert {row["case"] for row in rows} == {f"{CASES[0].name}, choice of settings"} and len(rows) == 4
    found = [row for row in case_rows(field, CASES[0], epochs, chosen) if row["what"] == "tokens"]
    assert [(row["method"], row["visit"]) for row in found] == [
        (ARCTIC, 0),
        (ARCTIC, 1),
        (ARCTIC_BEST, 0),
        (ARCTIC_BEST, 1),
        (PAPER, 1),
    ]
    assert found[2]["setting"] == "Arctic, factor 4"


def test_cases_of_the_second_model_have_names_of_their_own() -> None:
    assert OTHER_CASES[0].name == "2k, phrases, reuse 93 %"
    assert [len({one.name for one in cases}) for cases in (CASES, OTHER_CASES)] == [7, 2]


@pytest.mark.slow
def test_every_method_decodes_the_same_tokens(tmp_path: Path) -> None:
    found = [row for row in generated(field(tmp_path), TINY) if row["visit"] == 1]
    rows = [row for row in found if row["what"] == "tokens"]
    for case in {row["case"] for row in rows}:
        assert len({row["emitted"] for row in rows if row["case"] == case}) == 1
    mine = {str(row["case"]): float(row["tokens_per_forward"]) for row in rows if row["method"] == OURS}
    assert mine["2k, reuse 93 %"] > mine["2k, reuse 60 %"] > mine["2k, reuse 0 %"] == pytest.approx(1.0, abs=0.05)
    assert mine["2k, reuse 87 %"] > mine["2k, reuse 87 %, history missing"]
    bounds = {str(row["case"]): float(row["tokens_per_forward"]) for row in found if row["what"] == "bound"}
    assert bounds.keys() == mine.keys()
    assert all(bounds[case] > mine[case] for case in mine)


def test_modelled_speed_is_tokens_over_the_cost_of_their_forwards() -> None:
    # of 8 tokens the prompt's forward emits one, two forwards three each; the last drafts two for the one left
    engine = ModelledEngine(case="case", method_name="counting", method=Counting(2), max_draft_tokens=4)
    row = engine.decode([trace(range(1, 9))] * 2, 2)
    seconds = 3 * forward_s(2, 6)
    assert row["forwards"] == 3
    assert row["tokens_per_s"] == pytest.approx(14 / seconds, rel=1e-3)
    assert row["over_no_drafts"] == pytest.approx(14 / seconds / (2 / forward_s(2, 2)), rel=1e-3)
    assert forward_s(1, 2) == pytest.approx((10 + 0.08 + 0.162) / 1000)


def test_useless_history_has_modelled_rows_too(tmp_path: Path) -> None:
    rows = list(modelled(field(tmp_path), TINY, tmp_path))
    useless = [row for row in rows if row["case"] == "2k, reuse 0 %" and row["method"] == OURS]
    assert len(useless) == 1
    assert {row["method"] for row in rows} == {OURS, PAPER, "ours, threshold 0.1"}


class Suffixes:
    """Stands for Arctic's module: its caches draft nothing, and remember how long a draft may be."""

    def __init__(self) -> None:
        self.asked: set[int] = set()

    def SuffixDecodingCache(self, max_tree_depth: int, max_cached_requests: int) -> "Suffixes":
        return self

    def start_request(self, *_: object) -> None: ...

    stop_request = add_active_response = start_request

    def speculate(self, *_: object, max_spec_tokens: int, **__: object) -> SimpleNamespace:
        self.asked.add(max_spec_tokens)
        return SimpleNamespace(token_ids=[], probs=[])


def test_all_methods_of_modelled_rows_may_draft_as_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.drafting.quality.vllm_search", lambda: None)  # no row of `modelled` searches
    arctic = Suffixes()
    rows = list(modelled(contestants(tmp_path, arctic, cap=MODELLED_K), TINY, tmp_path))
    assert {row["method"] for row in rows} >= {OURS, "ours, threshold 0.1", PAPER, RELEASED, ARCTIC, ARCTIC_ONE_TREE}
    assert {row["max_draft_tokens"] for row in rows} == {MODELLED_K} and MODELLED_K >= SUFFIX_K
    assert max(arctic.asked) == MODELLED_K
    with pytest.raises(ValueError, match=f"{ARCTIC}.*largest draft must be {MODELLED_K} tokens"):
        list(modelled(contestants(tmp_path, arctic), TINY, tmp_path))


def test_arctic_with_vllms_defaults_may_draft_as_many_tokens_as_in_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of `num_speculative_tokens` is the depth of the trees. The source is read, as its import is slow."""
    monkeypatch.setattr("benchmarks.drafting.quality.vllm_search", lambda: None)
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "config" / "speculative.py").read_text(encoding="utf-8")
    assert f"suffix_decoding_max_tree_depth: int = {SUFFIX_K}\n" in source
    assert "self.num_speculative_tokens = self.suffix_decoding_max_tree_depth\n" in source
    caps = {one.name: one.max_draft_tokens for one in contestants(tmp_path, Suffixes())}
    assert caps[ARCTIC] == SUFFIX_K
    assert caps[OURS] == caps[OURS_ALL] == caps[ARCTIC_ONE_TREE] == K


def test_costs_are_counted_per_token_and_request(tmp_path: Path) -> None:
    old, new = visits(generate(reuse=0.87, num_tokens=300, num_prompts=1).traces)
    loaded = [load("case", one, old) for one in field(tmp_path)]
    assert loaded[0].row["tokens"] == sum(len(one.response_ids) for one in old)
    assert 8 < float(loaded[0].row["bytes_per_token"]) < 12
    rows = list(propose_rows("case", loaded, new, 4, rounds=3))
    assert [row["method"] for row in rows] == [OURS, PAPER]
    for row in rows:
        assert float(row["ms_per_batch"]) == pytest.approx(4e-3 * float(row["us_per_request"]), rel=0.1)
    assert int(attach_row(tmp_path, 1 << 20, repeats=3)["bytes"]) == pytest.approx(1 << 20, rel=0.2)


def test_goals_take_the_lower_end_over_seeds_and_name_what_is_missed() -> None:
    rows: list[Row] = []
    for seed, noise in ((1, 0.98), (2, 1.0), (3, 1.02)):
        more: list[Row] = []
        for case in (f"2k, reuse {reuse} %" for reuse in (93, 87, 76)):
            rates = ((OURS, 5.5 * noise), (OURS_ALL, 6.0 * noise), (ARCTIC, 3.0), (ARCTIC_BEST, 5.0))
            more += [tokens_row(case, name, 1, rate) for name, rate in rates]
        for length in ("2k", "16k"):
            more += [tokens_row(f"{length}, phrases, reuse {reuse} %", OURS, 1, 3.0) for reuse in (93, 76)]
            more += [
                {"what": "propose", "case": f"{length}, reuse 87 %", "method": name, "batch": batch, **times}
                for batch in (1, 256)
                for name, times in (
                    (OURS, {"us_per_request": 2.0, "ms_per_batch": 0.5}),
                    (ARCTIC, {"us_per_request": 30.0 if batch == 256 else 1.8, "ms_per_batch": 12.8}),
                )
            ]
            more.append({"what": "insert", "case": length, "method": OURS, "ns_per_token": 95.0})
        more += [tokens_row(f"16k, reuse {reuse} %", OURS, 1, 8.0) for reuse in (93, 87)]
        more += [
            tokens_row("2k, reuse 93 %", OURS_ALL, 0, 2.0 * noise),
            tokens_row("2k, reuse 93 %", ARCTIC_BEST, 0, 1.9),
        ]
        more += modelled_of_seed()
        rows += [{**row, "seed": seed} for row in more]
    rows.append({"what": "attach", "case": "attach", "method": OURS, "ms": 0.02})
    rows.append({**tokens_row("2k, reuse 0 %", OURS, 0, 1.0), "calibration_error": 0.03, "seed": 2})
    found = {goal.name: goal for goal in goals(rows)}
    assert found["worst calibration error of any case, visit and seed"].value == 0.03
    # mean 1.2 and standard deviation 0.024 of three seeds, whose interval is 4.30 standard errors wide on each side
    over_best = found[f"2k, reuse 93 %: over Arctic's best, {LOWER}"]
    assert over_best.value == pytest.approx(1.2 - 4.30 * 0.024 / 3**0.5)
    assert found[f"2k, reuse 93 %, first epoch: over Arctic's best, {LOWER}"].value < 2 / 1.9
    assert found[f"16k, reuse 87 %, batch 256: time of Arctic's default over ours, {LOWER}"].value == 15
    assert {name.removesuffix(f", {LOWER}") for name, goal in found.items() if not goal.met} == {
        "2k, reuse 93 %: tokens per forward",
        "2k, reuse 93 %: over Arctic's best",
        "2k, reuse 93 %, first epoch: over Arctic's best",
        "build, worst",
        *(f"{length}, reuse 87 %, batch 1: time of Arctic's default over ours" for length in ("2k", "16k")),
        *(f"modelled speed over HistoSpec's paper, batch {batch}" for batch in (1, 4, 16)),
        "modelled speed over the best peer's, batch 64, worst case",
        "worst calibration error of any case, visit and seed",
    }
    # Arctic is faster than the product at one reuse and batch, though not in the median of the reuses
    over_best = [f"modelled speed over the best peer's, batch {batch}, worst case, {LOWER}" for batch in (1, 64)]
    assert [found[name].value for name in over_best] == pytest.approx([1.4, 1.4 / 1.5])
    assert np.isfinite([goal.value for goal in found.values()]).all()


def modelled_of_seed() -> list[Row]:
    return [
        {"what": "modelled", "case": f"2k, reuse {reuse} %", "method": method, "batch": batch, **figures}
        for batch in (1, 4, 16, 64)
        for reuse in (93, 87, 76, 0)
        for method, figures in (
            (OURS, {"tokens_per_s": 1.4, "over_no_drafts": 0.99}),
            ("ours, threshold 0.1", {"tokens_per_s": 1.6, "over_no_drafts": 1.0}),
            (PAPER, {"tokens_per_s": 1.0, "over_no_drafts": 1.0}),
            (ARCTIC, {"tokens_per_s": 1.5 if (reuse, batch) == (93, 64) else 0.9, "over_no_drafts": 1.0}),
        )
    ]


def tokens_row(case: str, method: str, visit: int, rate: float) -> Row:
    row: Row = {"what": "tokens", "case": case, "method": method, "visit": visit, "tokens_per_forward": rate}
    return {**row, "emitted": 100, "calibration_error": 0.01}
