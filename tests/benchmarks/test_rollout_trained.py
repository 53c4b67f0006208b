"""What the trained model's rows are held against."""

import pytest

from benchmarks.record import Row
from benchmarks.rollout_trained import trained_goals

OVER_OTHERS = "warm start: tokens per CPU second over the best other's, stock included, temperature 1"
CHANGED = "warm start: greedy responses that drafts changed"


def rows(*, ours: float, num_differing: int = 0) -> list[Row]:
    sampled = {"stock": 1.0, "suffix": 1.8, "ours": ours}
    found: list[Row] = [{"history": "87 % reuse", "batch": 1, "method": "ours", "tokens_per_cpu_s": 9.0}]
    for temperature in (1.0, 0.0):
        for method, rate in sampled.items():
            row: dict[str, str | int | float | bool] = {
                "history": "warm start",
                "temperature": temperature,
                "method": method,
                "tokens_per_cpu_s": rate if temperature else 99.0,
            }
            if not temperature:
                row |= {"num_responses": 100, "num_differing": num_differing if method == "ours" else 50}
            found.append(row)
    return found


def test_the_best_peer_at_the_same_temperature_counts() -> None:
    found = {goal.name: goal for goal in trained_goals(rows(ours=2.7))}
    assert set(found) == {OVER_OTHERS, CHANGED}
    assert found[OVER_OTHERS].value == pytest.approx(1.5) and found[OVER_OTHERS].met
    assert not {goal.name: goal for goal in trained_goals(rows(ours=1.7))}[OVER_OTHERS].met


@pytest.mark.parametrize(("num_differing", "met"), [(0, True), (1, True), (2, False)])
def test_one_greedy_response_of_a_hundred_may_differ(num_differing: int, met: bool) -> None:
    (goal,) = [goal for goal in trained_goals(rows(ours=2, num_differing=num_differing)) if goal.name == CHANGED]
    assert (goal.value, goal.met) == (num_differing / 100, met)


def test_speed_rows_have_no_goal_here() -> None:
    assert trained_goals([row for row in rows(ours=2) if "temperature" not in row]) == []
