"""Inputs of the simulator from real engines, and the common workload of both."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner.engine_tasks import MAX_TOKENS, NUM_SLOTS, recorded, window, workload
from benchmarks.planner.real_engines import STEPS, Measured, _durations, fitted, goals
from history.store.traces import Trace, write_traces
from rollout.tracing.forwards import FORWARD


def forwards(num: int, *, seed: int = 0) -> np.ndarray:
    """Forwards of one engine, each 4 ms + .5 ms a row; every tenth lasts twice as long."""
    rng = np.random.default_rng(seed)
    found = np.zeros(num, dtype=FORWARD)
    found["num_running"] = rng.integers(1, NUM_SLOTS + 1, num)
    found["num_scheduled_tokens"] = found["num_running"]
    found["seconds"] = 0.004 + 0.0005 * found["num_running"]
    found["seconds"][::10] *= 2
    found["started_at_s"] = np.concatenate([[0.0], np.cumsum(found["seconds"])[:-1]])
    return found


def test_a_forward_lasts_until_the_next_one_starts_unless_the_engine_was_idle() -> None:
    found = forwards(3)
    found["started_at_s"] = [0.0, 0.05, 9.0]
    assert _durations(found) == pytest.approx([0.05, found["seconds"][1], found["seconds"][2]])


def test_the_fitted_speed_gives_the_total_time_of_all_forwards() -> None:
    both = forwards(600), forwards(600, seed=1)
    speed = fitted(Measured(makespan_s=1.0, idle=0.0, forwards=both))
    expected = sum(float(speed.fixed_s[of_one["num_running"]].sum()) for of_one in both)
    assert expected == pytest.approx(sum(float(_durations(of_one).sum()) for of_one in both), rel=0.01)
    assert speed.fixed_s[NUM_SLOTS] / speed.fixed_s[1] == pytest.approx(12 / 4.5, rel=0.1)


def test_lengths_are_bounded_and_forecast_in_their_order() -> None:
    work = workload(3, num_steps=8)
    lengths = work.lengths[:, 0]
    assert lengths.min() >= 2 and lengths.max() <= MAX_TOKENS
    assert np.corrcoef(np.log(lengths), np.log(work.forecasts))[0, 1] > 0.8


def write_run(directory: Path, *, num_steps: int = 4, longest: int = 9) -> None:
    """Two groups of two responses a step; step t trains for t + .5 seconds."""
    (directory / "traces").mkdir(parents=True)
    rows = [{"step": step, "timing_s/train": step + 0.5} for step in range(num_steps)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for step in range(num_steps):
        traces = [
            Trace(
                step=step,
                prompt_id=f"p{prompt}",
                sample=sample,
                prompt_ids=np.arange(3, dtype=np.int32),
                response_ids=np.arange(longest - 4 * prompt - 2 * sample - step % 2, dtype=np.int32),
                reward=0.0,
            )
            for prompt in range(2)
            for sample in range(2)
        ]
        write_traces(directory / "traces" / f"step-{step}.jsonl", traces)


def test_lengths_forecasts_and_training_times_are_read_from_a_recorded_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    task = recorded(tmp_path)
    assert task.work.lengths[:, 0].reshape(4, 4).tolist() == [[9, 7, 5, 3], [8, 6, 4, 2]] * 2
    assert task.work.groups_per_step == 4 and task.train_s == (0.5, 1.5, 2.5, 3.5)
    # nothing is known in the first step; later, that the first prompt's are longer
    forecasts = task.work.forecasts.reshape(4, 2, 2)
    assert len(set(forecasts[0].ravel())) == 1 and (forecasts[1:, 0] > forecasts[1:, 1]).all()


def test_a_window_selects_steps_of_a_recorded_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    task = recorded(tmp_path)
    second = window(task, 1, num_steps=2)
    assert second.train_s == (2.5, 3.5) and second.work.num_steps == 2
    assert (second.work.forecasts == task.work.forecasts[8:]).all()
    with pytest.raises(ValueError, match="4 steps; 6 are needed"):
        window(task, 2, num_steps=2)


def test_an_incomplete_recorded_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "long", longest=MAX_TOKENS + 1)
    with pytest.raises(ValueError, match=f"a response of {MAX_TOKENS + 1} tokens"):
        recorded(tmp_path / "long")
    write_run(tmp_path / "lost")
    (tmp_path / "lost" / "traces" / "step-2.jsonl").unlink()
    with pytest.raises(ValueError, match=r"steps \[2\] have metrics but no traces"):
        recorded(tmp_path / "lost")


def test_goals_are_medians_of_relative_errors() -> None:
    rows = [
        {
            "lengths": lengths,
            "scheme": "static",
            "simulated_over_real": ratio + shift,
            "idle": 0.2,
            "simulated_idle": idle,
        }
        for lengths, shift in zip(STEPS, (0.0, 0.2), strict=True)
        for ratio, idle in ((0.9, 0.21), (1.2, 0.2), (1.05, 0.1))
    ]
    makespan, idle, other, _ = goals(rows)
    assert makespan.value == pytest.approx(0.1) and makespan.met
    assert idle.value == pytest.approx(0.01) and idle.met
    assert other.value == pytest.approx(0.25) and not other.met


def test_one_scheme_that_disagrees_misses_the_goals_of_its_lengths() -> None:
    """Two schemes of three agree, so the median over all rows would be 0."""
    rows = [
        {
            "lengths": lengths,
            "scheme": scheme,
            "simulated_over_real": ratio,
            "idle": 0.2,
            "simulated_idle": 0.2 + (ratio > 1) * 0.06,
        }
        for lengths in STEPS
        for scheme, ratio in (("static", 1.0), ("lpt", 1.0), ("flexible", 1.2 if lengths == "drawn" else 1.0))
        for _ in range(3)
    ]
    found = {goal.name: (goal.value, goal.met) for goal in goals(rows)}
    assert found == {
        f"{figure}, {lengths} lengths: simulated against real, worst scheme's median": (pytest.approx(value), met)
        for figure, lengths, value, met in (
            ("makespan", "recorded", 0.0, True),
            ("idle share", "recorded", 0.0, True),
            ("makespan", "drawn", 0.2, False),
            ("idle share", "drawn", 0.06, False),
        )
    }
