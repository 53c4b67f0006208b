"""References of the trained model's rows, and the prompts that they sample."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.record import Row
from benchmarks.rollout.trained import _prompts, trained_goals
from history.store.traces import Trace, write_traces

OVER_OTHERS = "warm start: tokens per CPU second over the best other's, stock included, temperature 1"
CHANGED = "warm start: greedy responses that drafts changed"


def rows(*, ours: float, num_differing: int = 0, sample: int = 0) -> list[Row]:
    sampled = {"stock": 1.0, "suffix": 1.8, "ours": ours}
    found: list[Row] = [{"history": "87 % reuse", "batch": 1, "method": "ours", "tokens_per_cpu_s": 9.0}]
    for temperature in (1.0, 0.0):
        for method, rate in sampled.items():
            row: dict[str, str | int | float | bool] = {
                "history": "warm start",
                "sample": sample,
                "temperature": temperature,
                "method": method,
                "tokens_per_cpu_s": rate if temperature else 99.0,
            }
            if not temperature:
                row |= {"num_responses": 100, "num_differing": num_differing if method == "ours" else 50}
            found.append(row)
    return found


def goals(of: list[Row]) -> dict[str, float]:
    return {goal.name: goal.value for goal in trained_goals(of)}


def test_the_best_peer_at_the_same_temperature_counts() -> None:
    found = {goal.name: goal for goal in trained_goals(rows(ours=2.7))}
    assert set(found) == {OVER_OTHERS, CHANGED}
    assert found[OVER_OTHERS].value == pytest.approx(1.5) and found[OVER_OTHERS].met
    assert not {goal.name: goal for goal in trained_goals(rows(ours=1.7))}[OVER_OTHERS].met


def test_ratios_are_computed_within_a_sample_and_their_median_counts() -> None:
    found = [row for sample, ours in enumerate((0.9, 3.6, 2.7)) for row in rows(ours=ours, sample=sample)]
    assert goals(found)[OVER_OTHERS] == pytest.approx(1.5)


def test_every_checkpoint_has_its_own_goals() -> None:
    final = [{**row, "history": "final policy"} for row in rows(ours=3.6, num_differing=3) if "temperature" in row]
    found = goals([*rows(ours=2.7), *final])
    assert found == pytest.approx(
        {
            OVER_OTHERS: 1.5,
            CHANGED: 0.0,
            OVER_OTHERS.replace("warm start", "final policy"): 2.0,
            CHANGED.replace("warm start", "final policy"): 0.03,
        }
    )


@pytest.mark.parametrize(("num_differing", "met"), [(0, True), (2, True), (3, False)])
def test_one_greedy_response_of_a_hundred_may_differ(num_differing: int, met: bool) -> None:
    samples = rows(ours=2, num_differing=num_differing) + rows(ours=2, sample=1)
    (goal,) = [goal for goal in trained_goals(samples) if goal.name == CHANGED]
    assert (goal.value, goal.met) == (num_differing / 200, met)


def test_speed_rows_have_no_goal() -> None:
    assert trained_goals([row for row in rows(ours=2) if "temperature" not in row]) == []


def test_prompts_are_the_first_of_the_run_without_repetition(tmp_path: Path) -> None:
    ids = np.array([1, 2], dtype=np.int32)
    for step, names in ((2, "ab"), (10, "c"), (0, "dda")):
        asked = [
            Trace(prompt_id=name, prompt_ids=ids, response_ids=ids, step=step, sample=number, reward=0.0)
            for number, name in enumerate(names)
        ]
        write_traces(tmp_path / f"step-{step}.jsonl", asked)
    assert [trace.prompt_id for trace in _prompts(tmp_path, 4)] == ["d", "a", "b", "c"]
    assert [trace.prompt_id for trace in _prompts(tmp_path, 2)] == ["d", "a"]
    with pytest.raises(ValueError, match="4 prompts, 5"):
        _prompts(tmp_path, 5)
