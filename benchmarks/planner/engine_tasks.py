"""Work for two real engines and for the simulator: response lengths, forecasts and training times.

Lengths are drawn, or those of a recorded run; see `benchmarks.planner.real_engines`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness.example_run import read_metrics
from benchmarks.planner.simulator.bounds import saturated_s
from benchmarks.planner.simulator.engines import Speed
from benchmarks.planner.simulator.workload import Workload, replayed, single_responses
from history.store.traces import read_traces

NUM_ENGINES, NUM_SLOTS, WAVES = 2, 16, 2
MEAN_TOKENS, MAX_TOKENS, SIGMA = 120.0, 640, 0.9
CORRELATION = 0.9
TRAIN_SHARE = 0.5
"""Training time over the time of saturated engines."""


def workload(seed: int, *, num_steps: int) -> Workload:
    """Groups of one response; forecasts have the correlation `CORRELATION`."""
    rng = np.random.default_rng(seed)
    per_step = NUM_ENGINES * NUM_SLOTS * WAVES
    deviations, noise = rng.standard_normal((2, num_steps * per_step))
    known = CORRELATION * deviations + np.sqrt(1 - CORRELATION**2) * noise
    median = MEAN_TOKENS / np.exp(SIGMA**2 / 2)
    return Workload(
        lengths=np.clip(np.round(median * np.exp(SIGMA * deviations)), 2, MAX_TOKENS)[:, None],
        forecasts=median * np.exp(SIGMA * CORRELATION * known),
        groups_per_step=per_step,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work for both the engines and the simulator."""

    work: Workload
    train_s: tuple[float, ...]
    """Training time of each step."""


def drawn(seed: int, *, num_steps: int, speed: Speed | None = None) -> Task:
    """Work with drawn lengths. Training takes TRAIN_SHARE of the time of engines of that speed; 0 without a speed."""
    work = workload(seed, num_steps=num_steps)
    train_s = TRAIN_SHARE * saturated(work, speed) / num_steps if speed else 0.0
    return Task(work=work, train_s=(train_s,) * num_steps)


def recorded(run_dir: Path) -> Task:
    """Work of all steps of a recorded run.

    Raises:
        ValueError: a step has no traces, no time or another number of responses, or one is longer than `MAX_TOKENS`.
    """
    # a step that was repeated counts once, with its last time
    train_s = {int(row["step"]): row["timing_s/train"] for row in read_metrics(run_dir)}
    paths = {step: run_dir / "traces" / f"step-{step}.jsonl" for step in sorted(train_s)}
    lacking = [step for step, path in paths.items() if not path.is_file()]
    if lacking:
        raise ValueError(f"{run_dir}: steps {lacking} have metrics but no traces; name a complete run")
    work = single_responses(replayed(trace for path in paths.values() for trace in read_traces(path)))
    if work.num_steps != len(train_s):
        raise ValueError(
            f"{run_dir}: {work.num_steps} of {len(train_s)} steps have as many responses as the first; all must"
        )
    longest = int(work.lengths.max())
    if longest > MAX_TOKENS:
        raise ValueError(f"{run_dir}: a response of {longest} tokens; engines are set up for {MAX_TOKENS}")
    return Task(work=work, train_s=tuple(train_s.values()))


def window(task: Task, number: int, *, num_steps: int) -> Task:
    """Window `number` of a task, of `num_steps` steps.

    Raises:
        ValueError: `task` has too few steps.
    """
    first, end = number * num_steps, (number + 1) * num_steps
    if end > task.work.num_steps:
        raise ValueError(
            f"the run has {task.work.num_steps} steps; {end} are needed: pass a longer run or fewer --repeats"
        )
    groups = slice(first * task.work.groups_per_step, end * task.work.groups_per_step)
    work = replace(task.work, lengths=task.work.lengths[groups], forecasts=task.work.forecasts[groups])
    return Task(work=work, train_s=task.train_s[first:end])


def saturated(work: Workload, speed: Speed) -> float:
    """Seconds that engines of this speed need for the work if all their slots are always taken."""
    return saturated_s(
        work.lengths, fixed_s=speed.fixed_s, context_s=speed.context_s, gains=speed.gains, num_engines=NUM_ENGINES
    )
