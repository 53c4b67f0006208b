"""Answers take figures and verdicts from their records."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.harness.record_answers import Answer, Figure, first_of, goal, largest, largest_median
from benchmarks.harness.record_file import Goal, Record, Row, read_all
from benchmarks.harness.record_views import VIEWS

RECORDS = {record.name: record for record in read_all()}
VERDICTS = [name for name in RECORDS if VIEWS[name].answer.verdict is not None]
VERDICT_WORDS = ("Yes", "No:", "Within its bounds")


def record_of(rows: Sequence[Row] = (), **goals: float) -> Record:
    """A record of these rows, and of goals with these values, all of which are met."""
    return replace(
        RECORDS["soak"],
        rows=tuple(rows),
        goals=tuple(
            Goal(name=name, value=value, bound=value, direction="at most", unit="x") for name, value in goals.items()
        ),
    )


def missed(item: Goal) -> Goal:
    return replace(item, direction="at most", bound=item.value - 1)


@pytest.mark.parametrize("name", RECORDS)
def test_no_answer_has_a_verdict_that_does_not_depend_on_goals(name: str) -> None:
    answer, record = VIEWS[name].answer, RECORDS[name]
    assert not any(word in answer.text for word in VERDICT_WORDS)
    shown = answer.of(replace(record, goals=tuple(map(missed, record.goals))))
    assert not any(word in shown for word in VERDICT_WORDS)


@pytest.mark.parametrize("name", VERDICTS)
def test_one_missed_goal_changes_the_verdict(name: str) -> None:
    answer, record = VIEWS[name].answer, RECORDS[name]
    assert answer.verdict is not None and record.goals
    yes, no = answer.verdict
    all_met = replace(record, goals=tuple(replace(item, bound=item.value) for item in record.goals))
    assert answer.of(all_met).startswith(f"{yes}: ")
    for number, item in enumerate(all_met.goals):
        goals = (*all_met.goals[:number], missed(item), *all_met.goals[number + 1 :])
        assert answer.of(replace(record, goals=goals)).startswith(f"{no}: ")


def test_verdicts_are_those_of_the_questions_that_ask_for_yes_or_no() -> None:
    assert set(VERDICTS) == {"history_example", "history_soak", "planner_engines", "soak"}
    with pytest.raises(ValueError, match="has no goals"):
        Answer(text="{verdict}.", figures={}, verdict=("Yes", "No")).of(record_of())


def test_the_first_figure_counts_that_the_record_has() -> None:
    figure = first_of(goal("new"), goal("old"))
    assert [figure(record_of(**found)) for found in ({"new": 2.0, "old": 3.0}, {"old": 3.0})] == [2.0, 3.0]
    with pytest.raises(ValueError, match=r"has 0 goals 'new'.*has 0 goals 'old'"):
        figure(record_of())


ROWS: list[Row] = [
    {"method": "ours", "speed": 9.0},
    {"method": "Arctic, a", "speed": 1.0},
    {"method": "Arctic, a", "speed": 8.0},
    {"method": "Arctic, b", "speed": 5.0},
    {"method": "Arctic, c"},
]


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        (largest_median("speed", {}, by="method", begins="Arctic"), 5.0),
        (largest_median("speed", {"method": ("Arctic, a",)}, by="method", begins="Arctic"), 4.5),
        (largest("speed", {"method": ("Arctic, a", "Arctic, b", "Arctic, c")}), 8.0),
    ],
)
def test_figures_choose_among_the_rows(figure: Figure, value: float) -> None:
    assert figure(record_of(ROWS)) == value
    with pytest.raises(ValueError, match="no row with 'speed'"):
        figure(record_of([{"method": "Arctic, c"}]))


def answered(name: str, record: Record) -> str:
    return VIEWS[name].answer.of(record)


def publish_rows(*, whole: bool) -> list[Row]:
    """An 8-bit publish of 3 s with 4 s after the last loaded weight, its peer of 5 s, and a slow one in BF16."""
    case = {"trainer": "TP2", "engines": "1 x TP2", "transport": "shm"}
    times: dict[str, float] = {"timing_s/publish_deliver": 3.0, "timing_s/publish_probe": 4.0}
    return [
        row
        for format, peer_s in (("int8", 5.0), ("bf16", 0.1))
        for row in (
            {**case, **times, "kind": "publish", "format": format, "bytes_over_bf16": 0.5}
            | ({"total_s": 7.0} if whole else {}),
            {**case, "kind": "peer", "format": format, "deliver_s": peer_s},
        )
    ]


def test_the_answer_of_a_publish_names_a_figure_with_the_proof() -> None:
    bare, proven = "seconds without the proof over the peer's", "seconds with the proof over the peer's"
    text = answered("publish", record_of(publish_rows(whole=True), **{bare: 0.61, proven: 0.87}))
    assert "0.61 of the peer's time without the proof and 0.87 with it" in text
    old = answered("publish", record_of(publish_rows(whole=False), **{"seconds over the peer's": 0.61}))
    assert "0.61 of the peer's time without the proof and 1.4 with it" in old


def test_the_answer_of_drafting_names_the_best_setting_of_the_peer() -> None:
    same = {"what": "tokens", "case": "2k, reuse 87 %", "visit": 1}
    rates = (("ours", 5.0), ("Arctic, vLLM's defaults", 3.0), ("Arctic, factor 4", 4.5), ("vLLM ngram", 9.0))
    rows: list[Row] = [{**same, "method": method, "tokens_per_forward": rate} for method, rate in rates]
    rows.append({**same, "case": "2k, reuse 87 %, choice of settings", "method": "Arctic", "tokens_per_forward": 8.0})
    rows.append({"what": "propose", "case": "16k, reuse 87 %", "method": "ours", "batch": 256, "ms_per_batch": 0.5})
    assert "reaches 5 tokens per forward, Arctic at its best setting 4.5;" in answered("drafting", record_of(rows))


def test_the_answer_of_nodes_has_a_figure_for_each_number_of_nodes() -> None:
    ratios = {("disaggregated", 2): 1.01, ("disaggregated", 4): 1.02, ("colocated", 2): 0.51, ("colocated", 4): 0.76}
    rows: list[Row] = [{"mode": mode, "nodes": nodes, "ratio": ratio} for (mode, nodes), ratio in ratios.items()]
    text = answered("publish_over_nodes", record_of(rows))
    assert [f"{ratio:.3g}" in text.split() for ratio in (1.01, 1.02, 0.51, 0.76)] == [True] * 4


def test_the_answer_of_engines_states_the_turns_of_its_bounds() -> None:
    rows: list[Row] = [
        {"round": 1, "repeat": repeat, "history": "87 % reuse", "batch": batch, "method": "ours", "sampler": sampler}
        for batch, num_turns in ((1, 5), (8, 4), (64, 1))
        for repeat in range(num_turns)
        for sampler in ("vLLM", "product")
    ]
    bounds = {f"ours over stock, batch {batch}, 87 % reuse, lower 95 % bound": 2.0 for batch in (1, 8, 64)}
    text = answered("rollout", record_of(rows, **bounds))
    assert text.endswith("lower 95 % bounds of 5, 4 and 1 turns.")
