"""References of the trained model's rows, and the prompts that they sample."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.record import Row
from benchmarks.rollout.trained import _prompts, trained_goals
from history.store.traces import Trace, write_traces

BOUND = "tokens per CPU second over the best other's, stock included, temperature"
OVER_OTHERS = f"warm start: {BOUND} 1, lower 95 % bound"
GREEDY = f"warm start: {BOUND} 0, lower 95 % bound"
OVER_SUFFIX = "warm start: tokens per CPU second over suffix's, temperature 0, lower 95 % bound"
CHANGED = "warm start: greedy responses that drafts changed"


def rows(*, ours: float, num_differing: int = 0, sample: int = 0) -> list[Row]:
    """One sample of 100 tokens a method, by the tokens per CPU second of `ours`; greedy rows are twice as fast."""
    sampled = {"stock": 1.0, "suffix": 1.8, "ours": ours}
    found: list[Row] = [{"history": "87 % reuse", "batch": 1, "method": "ours", "tokens_per_cpu_s": 9.0}]
    for temperature in (1.0, 0.0):
        for method, rate in sampled.items():
            row: dict[str, str | int | float | bool] = {
                "history": "warm start",
                "sample": sample,
                "temperature": temperature,
                "method": method,
                "num_tokens": 100,
                "cpu_s": 100 / rate / (1 if temperature else 2),
            }
            if not temperature:
                row |= {"num_responses": 100, "num_differing": num_differing if method == "ours" else 50}
            found.append(row)
    return found


def goals(of: list[Row]) -> dict[str, float]:
    return {goal.name: goal.value for goal in trained_goals(of)}


def test_the_best_peer_at_the_same_temperature_counts() -> None:
    found = {goal.name: goal for goal in trained_goals(rows(ours=2.7))}
    assert set(found) == {OVER_OTHERS, GREEDY, OVER_SUFFIX, CHANGED}
    assert found[OVER_OTHERS].value == pytest.approx(1.5) and found[OVER_OTHERS].met
    assert found[GREEDY].value == pytest.approx(1.5)
    assert not {goal.name: goal for goal in trained_goals(rows(ours=1.7))}[OVER_OTHERS].met


def test_the_lower_bound_lies_between_the_worst_sample_and_all_samples_together() -> None:
    found = [row for sample in range(8) for row in rows(ours=2.7 + 0.1 * (sample % 4), sample=sample)]
    together = 8 / sum(1 / (2.7 + 0.1 * (sample % 4)) for sample in range(8)) / 1.8
    assert 1.5 < goals(found)[OVER_OTHERS] < together


def test_the_best_other_method_is_chosen_once_for_all_samples() -> None:
    """Stock is by chance faster than suffix in the second sample."""
    found = [row for sample in range(4) for row in rows(ours=2.7, sample=sample)]
    by_chance = {"sample": 1, "method": "stock", "temperature": 1.0}
    changed = [{**row, "cpu_s": 50.0} if by_chance.items() <= row.items() else row for row in found]
    assert goals(changed)[OVER_OTHERS] == pytest.approx(1.5)


def test_greedy_samples_have_a_goal_against_suffix_even_if_another_method_is_faster() -> None:
    """Stock is four times as fast as suffix when it is greedy."""
    found = [row for sample in range(3) for row in rows(ours=2.7, sample=sample)]
    greedy_stock = {"method": "stock", "temperature": 0.0}
    changed = goals([{**row, "cpu_s": 100 / 14.4} if greedy_stock.items() <= row.items() else row for row in found])
    assert changed[OVER_SUFFIX] == pytest.approx(1.5)
    assert changed[GREEDY] == pytest.approx(5.4 / 14.4)
    without = [row for row in found if row["method"] != "suffix"]
    assert OVER_SUFFIX not in goals(without)


def test_every_checkpoint_and_sampler_has_its_own_goals() -> None:
    final = [{**row, "history": "final policy"} for row in rows(ours=3.6, num_differing=3) if "temperature" in row]
    other = [{**row, "sampler": "product"} for row in rows(ours=0.9) if "temperature" in row]
    found = goals([*rows(ours=2.7), *final, *other])
    assert len(found) == 12
    assert found[OVER_OTHERS.replace("warm start", "final policy")] == pytest.approx(2.0)
    assert found[CHANGED.replace("warm start", "final policy")] == pytest.approx(0.03)
    assert found[OVER_OTHERS.replace(", lower", ", product's sampler for both, lower")] == pytest.approx(0.5)


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
