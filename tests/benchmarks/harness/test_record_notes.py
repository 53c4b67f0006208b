"""Notes of a page are about what its record has; goals are those of today's benchmark, or the page says otherwise."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from benchmarks.at_scale.__main__ import goals as at_scale_goals
from benchmarks.drafting.goals import goals as drafting_goals
from benchmarks.end_to_end.judged import goals as end_to_end_goals
from benchmarks.harness.record_file import Goal, Input, Record, Row, read_all
from benchmarks.harness.record_notes import (
    OLDER_GOALS,
    Note,
    all_of,
    has_goals,
    has_input,
    has_no_goals,
    has_rows,
    older_goals,
)
from benchmarks.harness.record_pages import pages
from benchmarks.harness.record_views import VIEWS
from benchmarks.harness.record_views.view import View
from benchmarks.learning.algorithms import goals as algorithms_goals
from benchmarks.learning.example_epochs import goals as history_example_goals
from benchmarks.learning.guard import goals as guard_goals
from benchmarks.learning.mismatch import goals as mismatch_goals
from benchmarks.packing.__main__ import goals as packing_goals
from benchmarks.planner.goals import goals as planner_goals
from benchmarks.planner.real_engines import goals as planner_engines_goals
from benchmarks.publish.delta import goals as publish_delta_goals
from benchmarks.publish.judged import goals as publish_goals
from benchmarks.publish.over_nodes import goals as publish_over_nodes_goals
from benchmarks.rollout.goals import goals as round_goals
from benchmarks.rollout.server import METHODS
from benchmarks.rollout.trained import trained_goals
from benchmarks.rollout.turns import BATCHES
from benchmarks.saves import goals as saves_goals

RECORDS = {record.name: record for record in read_all()}


def rollout_goals(rows: Sequence[Row]) -> list[Goal]:
    return [*round_goals(rows, METHODS, BATCHES), *trained_goals(rows)]


OF_ROWS: Mapping[str, Callable[[Sequence[Row]], Iterable[Goal]]] = {
    "algorithms": algorithms_goals,
    "at_scale": at_scale_goals,
    "drafting": drafting_goals,
    "end_to_end": end_to_end_goals,
    "guard": guard_goals,
    "history_example": history_example_goals,
    "mismatch": mismatch_goals,
    "packing": packing_goals,
    "planner": planner_goals,
    "planner_engines": planner_engines_goals,
    "publish": publish_goals,
    "publish_delta": publish_delta_goals,
    "publish_over_nodes": publish_over_nodes_goals,
    "rollout": rollout_goals,
    "saves": saves_goals,
}
"""Functions that compute all goals of a record from its rows."""


def of_today(record: Record) -> list[Goal]:
    """Goals by today's benchmark; none if the rows lack something that it needs."""
    try:
        return list(OF_ROWS[record.name](record.rows))
    except (KeyError, ValueError):
        return []


@pytest.mark.parametrize("name", OF_ROWS)
def test_goals_are_those_of_todays_benchmark_or_the_page_says_that_they_are_older(name: str) -> None:
    record = RECORDS[name]
    found = of_today(record)
    is_same = [replace(goal, value=0.0) for goal in found] == [replace(goal, value=0.0) for goal in record.goals]
    is_same = is_same and [goal.value for goal in found] == pytest.approx([goal.value for goal in record.goals])
    assert (OLDER_GOALS in pages([record])[f"{name}.md"]) is not is_same


NOTES = [(name, note) for name in RECORDS for note in VIEWS[name].notes if isinstance(note, Note)]


@pytest.mark.parametrize(("name", "note"), NOTES, ids=[f"{name}: {note.text[:40]}" for name, note in NOTES])
def test_a_note_is_shown_only_if_the_record_has_what_it_speaks_of(name: str, note: Note) -> None:
    record = RECORDS[name]
    assert (f"* {note.text}" in pages([record])[f"{name}.md"].splitlines()) is note.about(record)
    assert not note.about(replace(record, rows=(), goals=(), inputs=()))


def record_of(rows: Sequence[Row] = (), goals: Sequence[str] = (), inputs: Sequence[str] = ()) -> Record:
    """A record of these rows, names of goals and commands of inputs."""
    return replace(
        RECORDS["soak"],
        rows=tuple(rows),
        goals=tuple(Goal(name=name, value=1.0, bound=1.0, direction="at most", unit="x") for name in goals),
        inputs=tuple(Input(path="input", command=command) for command in inputs),
    )


def test_a_selector_of_rows_needs_one_row_with_all_values_and_fields_and_without_others() -> None:
    selects = has_rows({"kind": ("peer", "publish")}, fields=("seed",), lacks=("total_s",))
    assert selects(record_of([{"kind": "delta"}, {"kind": "peer", "seed": 1}]))
    assert not selects(record_of([{"kind": "peer"}, {"kind": "delta", "seed": 1}]))
    assert not selects(record_of([{"kind": "peer", "seed": 1, "total_s": 2.0}]))
    assert not selects(record_of())


def test_a_selector_of_goals_needs_a_part_of_a_name_and_older_goals_need_the_whole_name() -> None:
    record = record_of(goals=("speed, temperature 0, lower 95 % bound",))
    assert has_goals("temperature 0")(record) and not has_no_goals("temperature 0")(record)
    assert has_no_goals("temperature 1")(record)
    assert not all_of(has_goals("speed"), has_goals("temperature 1"))(record)
    assert older_goals("They are old.", "speed").text == f"{OLDER_GOALS} They are old."
    assert not older_goals("", "speed, temperature 0").about(record)
    assert older_goals("", "speed, temperature 0, lower 95 % bound").about(record)


def test_a_selector_of_inputs_needs_a_command_of_the_module_without_the_option() -> None:
    selects = has_input("examples.arithmetic.quickstart", lacks="--seed")
    seeded, other = "python -m examples.arithmetic.quickstart --work q --seed 2", "python -m benchmarks.planner"
    assert not selects(record_of(inputs=(seeded, other)))
    assert selects(record_of(inputs=(other, "python -m examples.arithmetic.quickstart --work q")))
    moved = has_input("benchmarks.planner.recorded_run", lacks="--seed")
    assert moved(record_of(inputs=("python -m benchmarks.recorded_run --warm q --out B",)))


def shown(name: str, record: Record) -> str:
    view: View = VIEWS[name]
    return " ".join(view.notes_of(record))


def test_peers_that_overlap_are_explained_only_where_rows_have_them() -> None:
    assert "overlapped peer" in shown("publish", record_of([{"kind": "overlapped peer"}]))
    assert "overlapped peer" not in shown("publish", record_of([{"kind": "peer"}]))


def test_a_page_of_engines_names_goals_of_greedy_speed_only_if_there_are_any() -> None:
    greedy = {"history": "warm start", "batch": 64, "method": "ours", "temperature": 0.0}
    name = "warm start: tokens per CPU second over suffix's, temperature 0, lower 95 % bound"
    assert "A goal of greedy speed" in shown("rollout", record_of([greedy], goals=(name,)))
    without = shown("rollout", record_of([greedy]))
    assert "A goal of greedy speed" not in without and "No goal bounds the speed of greedy samples" in without


@pytest.mark.parametrize(("num_turns", "is_few"), [(5, False), (4, True)])
def test_a_page_of_engines_says_that_fewer_than_five_turns_have_no_interval(num_turns: int, is_few: bool) -> None:
    rows = [
        {"round": 1, "repeat": repeat, "history": "87 % reuse", "batch": 64, "method": "ours", "sampler": sampler}
        for repeat in range(num_turns)
        for sampler in ("vLLM", "product")
    ]
    notes = shown("rollout", record_of(rows, goals=("ours over stock, batch 64, 87 % reuse, lower 95 % bound",)))
    assert ("fewer than five turns" in notes) is is_few
