"""A run directory as a colocated run with three engines would leave it, with tails that a person must see."""

from pathlib import Path

import numpy as np

from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.forward_traces import append_forwards
from launcher.run_dir.places import Places, write_places
from launcher.run_dir.step_timeline import StepTimeline
from rollout.tracing.forwards import FORWARD, Forwards

ORIGIN_S = 1.7e9
FIXED_S, TOKEN_S, CONTEXT_S = 0.020, 0.0003, 1e-7
NUM_ENGINES = 3
PLACES = Places(engines=("node1", "node1", "node2"), trainers=("node1", "node2"))


def decode(start_s: float, lengths: np.ndarray, slots: int = 64) -> Forwards:
    """Forwards of one engine that samples responses of these lengths, as many at once as it has slots."""
    rows, now, waiting = [], start_s, list(lengths)
    left: list[int] = []
    while waiting or left:
        while waiting and len(left) < slots:
            left.append(int(waiting.pop(0)))
        context = 200 * len(left)
        seconds = FIXED_S + TOKEN_S * len(left) + CONTEXT_S * context
        rows.append((now, len(left), 0, len(left), context, seconds))
        now += seconds + 0.002
        left = [count - 1 for count in left if count > 1]
    return np.array(rows, dtype=FORWARD)


def write_run(path: Path, *, num_steps: int = 6, seed: int = 0) -> None:
    """Metrics, spans and forwards of `num_steps` steps; an evaluation and a checkpoint after the third."""
    random = np.random.default_rng(seed)
    timeline = StepTimeline(NUM_ENGINES)
    now = ORIGIN_S
    with RunDirectory(path) as run:
        write_places(path, PLACES)

        def span(actor: str, activity: str, seconds: float) -> None:
            nonlocal now
            run.record_span(actor, activity, now, now + seconds)
            timeline.add_span(actor, activity, now, now + seconds)
            now += seconds

        for step in range(num_steps):
            began = now
            of_engines = [
                decode(now + 0.03, np.minimum(random.lognormal(3.6, 0.8, size=96 + 16 * engine), 400).astype(int) + 1)
                for engine in range(NUM_ENGINES)
            ]
            last = max(float(forwards["started_at_s"][-1] + forwards["seconds"][-1]) for forwards in of_engines)
            for engine, forwards in enumerate(of_engines):
                append_forwards(path / "traces", engine, forwards)
            timeline.add_forwards(of_engines)
            span("engines", "rollout", last + 0.25 - now)
            span("trainer", "train", 3.0)
            span("publisher", "publish", 0.8)
            metrics = timeline.close(now, now - began)
            run.append_metrics(step, {"reward/mean": 0.5, "timing_s/step": now - began, **metrics}, ended_s=now)
            if step == 2:
                span("engines", "evaluate", 1.0)
                span("trainer", "checkpoint", 1.5)
