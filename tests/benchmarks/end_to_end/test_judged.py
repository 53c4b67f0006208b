"""Seconds to an accuracy, differences within seeds and goals, on rows with known answers."""

import itertools
import math
import xml.etree.ElementTree as ET

import pytest

from benchmarks.end_to_end import picture
from benchmarks.end_to_end.arms import ARMS, BASE, NO_HISTORY, OTHER_HISTORY, OURS, PLAIN_LOOP, SHARED, TRL, keys
from benchmarks.end_to_end.changed_engine import neighbour
from benchmarks.end_to_end.judged import check_regime, completed, differences, goals, never_falling, seconds_to
from benchmarks.end_to_end.resumed import absent, discarded, kept
from benchmarks.end_to_end.run_arm import FULL, RL, Place, product_command
from benchmarks.harness.record import Row
from benchmarks.harness.record_file import Record
from benchmarks.harness.record_views.end_to_end import END_TO_END
from launcher.checks.combinations import run_combinations
from launcher.config.loading import load
from launcher.config.schema import RunConfig

SPEEDS = {BASE: 1.0, OURS: 2.0, TRL: 0.8, PLAIN_LOOP: 1.6}


def runs(slower: float = 1.0) -> list[Row]:
    """Three seeds of different lengths; accuracy rises from 0.4 to 0.9 in every arm."""
    rows: list[Row] = []
    for seed, arm in itertools.product((11, 12, 13), ARMS):
        step = seed / SPEEDS.get(arm, 1.0) * (slower if arm == OURS else 1.0)
        points: list[Row] = [
            {"what": "evaluation", "seed": seed, "arm": arm, "step": n, "seconds": n * step, "accuracy": 0.4 + n / 120}
            for n in range(0, 61, 10)
        ]
        whole: Row = {"what": "run", "seed": seed, "arm": arm, "step_s": step, "rollout_share": 0.8}
        rows += [completed(whole, points), *points]
    return rows


def test_fitted_accuracies_never_fall_and_are_the_nearest_such() -> None:
    values = [0.3, 0.5, 0.4, 0.9, 0.6]
    fitted = never_falling(values)
    assert fitted == pytest.approx([0.3, 0.45, 0.45, 0.75, 0.75])
    grid = [number / 20 for number in range(21)]
    best = min(
        sum((x - y) ** 2 for x, y in zip(values, each, strict=True))
        for each in itertools.combinations_with_replacement(grid, 5)
    )
    assert sum((x - y) ** 2 for x, y in zip(values, fitted, strict=True)) == pytest.approx(best)


def test_seconds_to_an_accuracy_lie_on_lines_between_evaluations() -> None:
    assert seconds_to(0.7, [(10, 0.5), (20, 0.6), (40, 0.8)]) == pytest.approx(30)
    assert seconds_to(0.5, [(10, 0.5), (20, 0.6)]) == 10
    assert seconds_to(0.7, [(10, 0.5), (20, 0.6)]) == math.inf
    assert seconds_to(0.7, [(40, 0.8), (10, 0.8), (20, 0.4)]) == pytest.approx(20 + 20 * (0.1 / 0.2))


def test_differences_are_within_seeds_and_goals_follow() -> None:
    found = {(row["arm"], row["against"]): row for row in differences(runs())}
    assert found[OURS, BASE]["speed"] == pytest.approx(2, abs=0.01)
    assert found[OURS, BASE]["speed_low"] == pytest.approx(2, abs=0.02)
    assert found[OURS, TRL]["speed"] == pytest.approx(2.5, abs=0.01)
    assert found[OURS, PLAIN_LOOP]["step_speed"] == pytest.approx(1.25)
    assert (NO_HISTORY, OTHER_HISTORY) in found and found[TRL, BASE]["accuracy_points"] == 0
    assert missed(runs()) == set()
    assert missed(runs(slower=1.5)) == {f"{OURS} over {other}" for other in (BASE, TRL, PLAIN_LOOP)}
    assert missed(runs(slower=2.1)) == {f"{OURS} over {other}" for other in (BASE, SHARED, TRL, PLAIN_LOOP)}


def missed(rows: list[Row]) -> set[str]:
    return {goal.name.partition(":")[0] for goal in goals([*differences(rows)]) if not goal.met}


def test_means_of_speeds_are_geometric() -> None:
    rows: list[Row] = [
        {"what": "run", "seed": seed, "arm": arm, "step_s": step, "accuracy_last": 0.9, "seconds_to_accuracy": 1.0}
        for seed, arm, step in ((1, BASE, 2.0), (1, OURS, 1.0), (2, BASE, 8.0), (2, OURS, 1.0))
    ]
    (row, *_) = differences(rows)
    assert (row["arm"], row["step_speed"]) == (OURS, 4.0)
    assert float(row["step_speed_low"]) * float(row["step_speed_high"]) == pytest.approx(16.0, rel=1e-2)


def test_lost_accuracy_and_a_control_that_gains_miss_their_goals() -> None:
    rows: list[Row] = [dict(row) for row in runs()]
    for row in rows:
        if row["what"] == "run" and row["arm"] == "drafts":
            row["accuracy_last"] = float(row["accuracy_last"]) - 0.04  # type: ignore[index]
        if row["what"] == "run" and row["arm"] == OTHER_HISTORY:
            row["step_s"] = float(row["step_s"]) / 1.1  # type: ignore[index]
    assert missed(rows) == {"drafts", f"{NO_HISTORY} over {OTHER_HISTORY}"}


def test_what_was_not_measured_meets_no_goal() -> None:
    own = [arm for arm in ARMS if arm != BASE and ARMS[arm].peer is None]
    speeds = {f"{OURS} over {other}" for other in (BASE, SHARED, TRL, PLAIN_LOOP)}
    assert missed([]) == {*own, *speeds, f"{NO_HISTORY} over {OTHER_HISTORY}"}


def test_a_speed_that_was_not_reached_meets_no_goal() -> None:
    rows = [{key: value for key, value in row.items() if key != "seconds_to_accuracy"} for row in runs()]
    judged = [*differences(rows)]
    assert {row["reached"] for row in judged} == {0}
    assert sum(not goal.met for goal in goals(judged)) == 4


@pytest.mark.parametrize("share", [0.69, 0.91])
def test_another_regime_on_the_mean_of_the_seeds_ends_the_benchmark(share: float) -> None:
    rows: list[Row] = [
        {"what": "run", "arm": BASE, "seed": seed, "rollout_share": each}
        for seed, each in enumerate((share - 0.1, share + 0.1))
    ]
    with pytest.raises(SystemExit, match=f"{share:.0%} of its steps are rollout"):
        check_regime(rows)
    check_regime(rows, fewest=3)
    check_regime([*runs(), *({**row, "arm": OURS} for row in rows)])
    check_regime([{**rows[0], "rollout_share": 0.69}, {**rows[1], "rollout_share": 0.8}])


def test_every_arm_is_a_configuration_that_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("arms")
    place = Place(warm=folder / "warm", work=folder, peers=folder)
    for name, arm in ARMS.items():
        if arm.peer is None:
            command = product_command(arm, 1000, folder / "run", place, FULL)
            config = load(RunConfig, RL, command[command.index(str(RL)) + 1 :])
            assert run_combinations(config) == []
            assert config.history.drafts == ("history.drafts=true" in keys(arm)), name
            placed = (config.placement.mode, config.engine.cpu_cores, config.trainer.cpu_threads)
            assert placed == (("colocated", 2, 2) if name == SHARED else ("disaggregated", 1, 1))
            assert config.num_steps * config.algorithm.prompts_per_step == 5 * 48


def test_neighbours_swap_their_histories() -> None:
    ids = [f"train/{number}" for number in range(48)]
    assert sorted(map(neighbour, ids)) == sorted(ids)
    assert all(neighbour(each) != each and neighbour(neighbour(each)) == each for each in ids)


def test_every_row_is_in_a_table_of_the_view_and_its_answer_names_the_speeds() -> None:
    rows = [*runs(), *differences(runs())]
    assert [row for row in rows if not any(table.selects(row) for table in END_TO_END.tables)] == []
    record = Record(
        name="end_to_end",
        command="",
        date="",
        inputs=(),
        versions={},
        machine={},
        stolen_share=None,
        rows=tuple(rows),
        goals=(),
        not_measured=(),
    )
    assert "Over 3 seeds 2 times as soon as synchronous BF16 (2 to 2), 1.25 times" in END_TO_END.answer.of(record)


def test_the_picture_has_a_line_for_each_arm() -> None:
    svg = picture.accuracy(runs())
    texts = [element.text for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]
    assert {OURS, BASE, TRL, PLAIN_LOOP, "seconds", "accuracy"} <= set(texts)


@pytest.mark.parametrize("change", ["machine", "boot", "commit"])
def test_a_resumed_seed_has_runs_of_one_machine_one_boot_and_one_commit(change: str) -> None:
    here: Row = {"machine": "a", "boot": "a", "commit": "a"}
    exact = [arm for arm in ARMS if ARMS[arm].keys.get("engine.format") != "int8"]
    whole: list[Row] = [{"what": "run", "seed": 11, "arm": arm, **here} for arm in exact]
    begun: list[Row] = [{"what": "run", "seed": 12, "arm": arm, **here} for arm in exact[:-1]]
    point: Row = {"what": "evaluation", "seed": 12, "arm": exact[0], "step": 0}
    rows = [*whole, *begun, point]
    assert kept(rows, lambda seed: [*ARMS], here) == (rows, set())
    left, ended = kept(rows, lambda seed: [*ARMS], {**here, change: "b"})
    assert ended == {11} and left[: len(whole)] == whole
    assert [(row["what"], row["arm"]) for row in left[len(whole) :]] == [("discarded", row["arm"]) for row in begun]
    assert kept(left, lambda seed: [*ARMS], {**here, change: "b"}) == (left, {11})


def test_runs_that_are_still_to_come_are_named() -> None:
    rows: list[Row] = [{"what": "run", "seed": seed, "arm": arm} for seed in (12, 13, 14, 18) for arm in ARMS]
    rows += [{"what": "run", "seed": seed, "arm": arm} for seed in (19, 20) for arm in (BASE, OURS, SHARED, TRL)]
    assert absent(rows, []) == [f"{PLAIN_LOOP}: seeds 19, 20"]
    assert absent(rows, [PLAIN_LOOP]) == []
    fewer = [row for row in rows if (row["arm"], row["seed"]) != (NO_HISTORY, 13)]
    assert absent([*fewer, {"what": "discarded", "seed": 13, "arm": NO_HISTORY}], [PLAIN_LOOP]) == [
        f"{NO_HISTORY}: seed 13"
    ]


def test_a_run_that_does_not_count_keeps_its_seconds() -> None:
    row = discarded({"what": "run", "seed": 3, "arm": OURS, "seconds": 9.0, "tokens": 5}, "why")
    assert row == {"what": "discarded", "seed": 3, "arm": OURS, "seconds": 9.0, "why": "why"}
