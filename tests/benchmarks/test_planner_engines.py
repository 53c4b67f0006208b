"""What the simulator is told of real engines, and what both are given to do."""

import numpy as np
import pytest

from benchmarks.planner_engines import MAX_TOKENS, NUM_SLOTS, Measured, _durations, fitted, goals, workload
from rollout.engine_trace import FORWARD


def forwards(num: int, *, seed: int = 0) -> np.ndarray:
    """Forwards of one engine, each 4 ms + .5 ms a row; every tenth takes twice as long."""
    rng = np.random.default_rng(seed)
    found = np.zeros(num, dtype=FORWARD)
    found["num_running"] = rng.integers(1, NUM_SLOTS + 1, num)
    found["num_scheduled_tokens"] = found["num_running"]
    found["seconds"] = 0.004 + 0.0005 * found["num_running"]
    found["seconds"][::10] *= 2
    found["started_at_s"] = np.concatenate([[0.0], np.cumsum(found["seconds"])[:-1]])
    return found


def test_an_engine_lasts_from_one_start_to_the_next_unless_it_had_nothing_to_do() -> None:
    found = forwards(3)
    found["started_at_s"] = [0.0, 0.05, 9.0]
    assert _durations(found) == pytest.approx([0.05, found["seconds"][1], found["seconds"][2]])


def test_the_fitted_speed_takes_the_time_of_all_forwards_together() -> None:
    both = forwards(600), forwards(600, seed=1)
    speed = fitted(Measured(makespan_s=1.0, idle=0.0, forwards=both))
    expected = sum(float(speed.fixed_s[of_one["num_running"]].sum()) for of_one in both)
    assert expected == pytest.approx(sum(float(_durations(of_one).sum()) for of_one in both), rel=0.01)
    assert speed.fixed_s[NUM_SLOTS] / speed.fixed_s[1] == pytest.approx(12 / 4.5, rel=0.1)


def test_lengths_are_bounded_and_foretold_in_their_order() -> None:
    work = workload(3, num_steps=8)
    lengths = work.lengths[:, 0]
    assert lengths.min() >= 2 and lengths.max() <= MAX_TOKENS
    assert np.corrcoef(np.log(lengths), np.log(work.forecasts))[0, 1] > 0.8


def test_goals_are_medians_of_distances() -> None:
    rows = [
        {"simulated_over_real": ratio, "idle": 0.2, "simulated_idle": idle}
        for ratio, idle in ((0.9, 0.21), (1.2, 0.2), (1.05, 0.1))
    ]
    makespan, idle = goals(rows)
    assert makespan.value == pytest.approx(0.1) and makespan.met
    assert idle.value == pytest.approx(0.01) and idle.met
