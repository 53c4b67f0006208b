"""Ratios pair rows of one round, and a real engine emits the recording with and without drafts."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.drafting.traces import VOCABULARY
from benchmarks.rollout.__main__ import QUICK
from benchmarks.rollout.client import EngineProcess, Setup
from benchmarks.rollout.forced_sampler import RESPONSE, ForcedSampler
from benchmarks.rollout.goals import goals, lower_bound, ratios
from benchmarks.rollout.server import METHODS
from benchmarks.rollout.settings import TRIED, best_settings, rounds_of_settings, speculations
from benchmarks.rollout.traced_engine import write_model
from benchmarks.rollout.turns import REPEATS, SAMPLERS, calibration_turns, rounds, split, write_cell
from history.store.traces import read_traces


def row(number: int, method: str, rate: float, *, batch: int = 1, history: str = "87 % reuse") -> dict:
    return {"round": number, "history": history, "batch": batch, "method": method, "tokens_per_cpu_s": rate}


def test_ratios_are_computed_within_a_round() -> None:
    rows = [row(1, "stock", 10), row(1, "ours", 30), row(2, "stock", 5), row(2, "ours", 20), row(3, "stock", 5)]
    rows += [row(1, "ours", 99, batch=8), row(1, "ours", 99, history="random history")]
    assert ratios(rows, "87 % reuse", 1, "ours", "stock") == [3, 4]


def test_the_lower_bound_lies_between_the_worst_and_the_median() -> None:
    values = np.random.default_rng(0).normal(1, 0.02, 15).tolist()
    assert min(values) <= lower_bound(values) < np.median(values)
    assert lower_bound([1.5] * 4) == 1.5


def test_goals_take_the_lower_bound_of_five_turns_and_none_of_fewer() -> None:
    rows = [
        row(1, method, rate * (1 + 0.1 * repeat * (method == "ours")), batch=batch, history=history)
        | {"repeat": repeat, "sampler": sampler}
        for repeat in range(5)
        for batch in (1, 8)
        for history in ("87 % reuse", "random history")
        for sampler in SAMPLERS
        for method, rate in (("stock", 10), ("ngram", 12), ("ours", 20 if sampler == SAMPLERS[0] else 8))
    ]
    found = {goal.name: goal for goal in goals(rows, ("stock", "ngram", "ours"), (1, 8))}
    # ratios 2.0, 2.2, 2.4, 2.6, 2.8
    over_stock = found["ours over stock, batch 1, 87 % reuse, lower 95 % bound"]
    assert 2.0 <= over_stock.value < 2.4 and not over_stock.met
    assert found["ours over stock, batch 8, 87 % reuse, lower 95 % bound"].met
    over_ngram = found["ours over ngram, batch 8, 87 % reuse, lower 95 % bound"]
    assert over_ngram.value == pytest.approx(over_stock.value * 10 / 12)
    assert found["ours over stock, batch 8, random history, lower 95 % bound"].met
    assert not found["ours over stock, batch 8, random history, product's sampler for both, lower 95 % bound"].met
    assert goals([one for one in rows if one["repeat"] < 4], ("stock", "ngram", "ours"), (1, 8)) == []


def test_the_best_setting_has_the_largest_geometric_mean_over_batches() -> None:
    rows = [
        row(0, "suffix", rate, batch=batch, history="calibration") | {"setting": setting}
        for setting, rates in (("factor 1", (10, 100)), ("factor 2", (13, 90)), ("factor 4", (20, 40)))
        for batch, rate in zip((8, 32), rates, strict=True)
    ]
    rows += [row(1, "suffix", 999) | {"setting": "factor 4"}]
    assert best_settings(rows) == {"suffix": "factor 2"}
    assert speculations({"suffix": "factor 2"}) == {"suffix": {"suffix_decoding_max_spec_factor": 2.0}}
    assert best_settings([]) == {}


def test_every_setting_is_tried_once_and_on_prompts_of_no_round() -> None:
    starts = rounds_of_settings(METHODS)
    assert sorted(pair for start in starts for pair in start.items()) == sorted(
        (method, name) for method, names in TRIED.items() for name in names
    )
    assert rounds_of_settings(("stock", "ours")) == []
    tried = {turn.seed for turn in calibration_turns((1, 8, 32, 64))}
    measured = {turn.seed for one in rounds((1, 8, 32, 64), 2) for turn in (*one.warm_ups, *one.turns)}
    assert len(tried) == 4 and not tried & measured


def test_all_methods_alternate_and_peers_have_no_useless_history() -> None:
    methods = ("stock", "ngram", "ours")
    found = [turn for one in rounds((1, 8), 2) for turn in one.turns]
    assert REPEATS >= 5
    for sampler in SAMPLERS:
        of_one = [turn for turn in found if (turn.round, turn.history, turn.batch) == (2, "87 % reuse", 8)]
        assert [turn.repeat for turn in of_one if turn.sampler == sampler] == list(range(REPEATS))
    first = {turn.methods(methods)[0] for turn in found if turn.history == "87 % reuse"}
    assert first == set(methods)
    assert {frozenset(turn.methods(methods)) for turn in found if turn.history != "87 % reuse"} == {
        frozenset({"stock", "ours"})
    }


def test_engines_warm_up_in_every_round_with_a_useful_history() -> None:
    found = list(rounds((1, 8), 2))
    seeds = [turn.seed for one in found for turn in (*one.warm_ups, *one.turns)]
    assert len(set(seeds)) == len(seeds)
    for one in found:
        assert {(turn.history, turn.batch) for turn in one.warm_ups} == {
            (turn.history, turn.batch) for turn in one.turns
        }
        assert one.warm_ups[-1].history == "87 % reuse"


def test_an_interrupted_round_is_repeated_by_all_methods() -> None:
    methods = ("stock", "ngram", "ours")
    rows = [{**row(1, method, 10), "repeat": 0} for method in methods]
    rows += [{**row(1, method, 10), "repeat": 1} for method in methods[:2]]
    rows += [{"history": "warm start", "batch": 64, "method": "stock", "temperature": 1.0}]

    def interrupted(methods: tuple[str, ...]) -> tuple[list[dict], list[int]]:
        kept, (one, _) = split(rounds((1,), 1), rows, methods)
        return kept, [turn.repeat for turn in one.turns if turn.history == "87 % reuse"]

    assert interrupted(methods) == (rows[:3], [1, 2, 3, 4])
    assert interrupted(("stock", "ngram")) == (rows[:5], [2, 3, 4])


def test_a_cell_has_one_earlier_visit_and_the_batch_of_the_next(tmp_path: Path) -> None:
    history, traces = write_cell(tmp_path, reuse=0.87, batch=12, num_tokens=64, seed=5)
    before, now = list(read_traces(history)), list(read_traces(traces))
    assert len(before) == 16 and len(now) == 12
    assert {trace.step for trace in before} == {0} and {trace.step for trace in now} == {1}
    assert {trace.prompt_id for trace in now} <= {trace.prompt_id for trace in before}


def test_the_recorded_token_has_the_largest_logit_at_every_position() -> None:
    """Two requests: one has emitted two tokens and drafts two; the other drafts none and is at its last token."""
    responses = [np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([3, 4], dtype=np.int32)]
    requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args={RESPONSE: number}))
        for name, number in (("a", 0), ("b", 1))
    }
    batch = SimpleNamespace(
        req_ids=["a", "b"], num_tokens_no_spec=np.array([12, 11]), num_prompt_tokens=np.array([10, 10])
    )
    runner = SimpleNamespace(
        input_batch=batch, requests=requests, _sample=lambda logits, _: logits.argmax(dim=1).tolist()
    )
    sampler = ForcedSampler(runner)
    sampler.responses = responses
    logits = torch.randn(4, 16)
    assert runner._sample(logits, SimpleNamespace(num_draft_tokens=[2, 0])) == [7, 8, 9, 4]
    assert sampler.num_row_forwards == 2
    assert sampler.num_emitted() == 3


@pytest.mark.slow
@pytest.mark.bench
def test_a_real_engine_emits_the_recording_in_fewer_forwards_with_its_history(tmp_path: Path) -> None:
    write_model(
        tmp_path / "model",
        vocabulary=VOCABULARY,
        hidden=QUICK.hidden,
        layers=QUICK.layers,
        intermediate=QUICK.intermediate,
        heads=QUICK.heads,
    )
    setup = Setup(
        model=tmp_path / "model", max_model_len=QUICK.max_model_len, max_num_seqs=max(QUICK.batches), own_sampler=True
    )
    engine = EngineProcess("ours", tmp_path, setup)
    try:
        decoded = [  # forward costs are learned during decoding
            engine.decode(*write_cell(tmp_path, reuse=0.9, batch=8, num_tokens=QUICK.num_tokens, seed=seed))
            for seed in range(3)
        ]
        history, prompts = write_cell(tmp_path, reuse=0.9, batch=8, num_tokens=QUICK.num_tokens, seed=3)
        first, second = (engine.sample(history, prompts, temperature=0.0, seed=seed, max_tokens=20) for seed in (1, 2))
    finally:
        engine.close()
    traces = list(read_traces(tmp_path / "2.jsonl"))
    assert decoded[2]["num_tokens"] == pytest.approx(
        sum(len(trace.response_ids) for trace in traces), abs=4 * len(traces)
    )
    drafted, tokens, forwards = (
        sum(found[name] for found in decoded) for name in ("num_drafted", "num_tokens", "num_row_forwards")
    )
    assert drafted > 0
    assert tokens - forwards > 0.3 * drafted
    # draft lengths depend on forward costs, and so on other load of the machine: accepted tokens are compared with
    # chains of the drafted length whose tokens are each right with probability 0.7
    last = decoded[-1]
    length = last["num_drafted"] // last["num_row_forwards"]
    accepted = last["num_tokens"] - last["num_row_forwards"]
    assert accepted > last["num_row_forwards"] * sum(0.7**n for n in range(1, 1 + length))
    (took, responses), (_, again) = first, second
    assert responses == again
    assert [len(response) for response in responses] == [20] * 8
    assert took["num_tokens"] == 160
