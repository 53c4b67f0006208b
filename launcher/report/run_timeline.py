"""Reads what a run recorded of its time: spans, forwards of engines, when its steps began and ended.

Whatever a kill, a full disk or an older version left out is said in `notes`, one sentence each, and the rest is shown.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.run_dir.forward_traces import read_forwards
from rollout.tracing.engine_speed import EngineSpeed, fit_speed
from rollout.tracing.forwards import Forwards
from rollout.tracing.timeline import EngineTimeline, Span, engine_timelines

MAX_FORWARD_BYTES = 128 << 20
"""Of the newest forwards that are looked at, all engines together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """When a step went on; wall clock."""

    number: int
    """Counted from 0."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """Who did what over a whole run."""

    spans: Sequence[Span]
    """In order of their starts."""
    forwards: Sequence[Forwards]
    """Of each engine."""
    steps: Sequence[Step]
    speed: EngineSpeed | None
    """Of an engine, from all forwards; None where there are too few."""
    notes: Sequence[str]

    @property
    def bounds_s(self) -> tuple[float, float] | None:
        """From the first thing that anybody did to the last; wall clock. None where nothing was recorded."""
        known = [forwards for forwards in self.forwards if len(forwards)]
        starts = [span.start_s for span in self.spans]
        starts += [float(forwards["started_at_s"].min()) for forwards in known]
        ends = [span.end_s for span in self.spans]
        ends += [float((forwards["started_at_s"] + forwards["seconds"]).max()) for forwards in known]
        return (min(starts), max(ends)) if starts and max(ends) > min(starts) else None

    def engines(self, start_s: float, end_s: float) -> list[EngineTimeline]:
        """Each engine from `start_s` to `end_s`."""
        return engine_timelines(self.forwards, self.spans, start_s=start_s, end_s=end_s, speed=self.speed)


def read_timeline(run_dir: Path, metrics: Sequence[Mapping[str, float]]) -> RunTimeline:
    """Read the timeline of a run; `metrics` are the rows of its `metrics.jsonl`."""
    spans, notes = _read_spans(run_dir / "events.jsonl")
    forwards, is_cut = read_forwards(run_dir / "traces", max_bytes=MAX_FORWARD_BYTES)
    steps = _steps(metrics)
    begun = [float(of_one["started_at_s"][0]) for of_one in forwards if len(of_one)]
    if is_cut and begun:
        spans = [span for span in spans if span.end_s > max(begun)]
        steps = [step for step in steps if step.start_s > max(begun)]
        notes.append(f"Engines ran more forwards than are shown; the newest {len(steps)} steps are.")
    speed = fit_speed(np.concatenate(forwards)) if begun else None
    if not begun:
        notes.append("No forwards of engines were recorded, so what engines did is not shown.")
    elif speed is None:
        notes.append(f"{sum(map(len, forwards))} forwards are too few to say how full the engines were.")
    return RunTimeline(
        spans=sorted(spans, key=lambda span: span.start_s), forwards=forwards, steps=steps, speed=speed, notes=notes
    )


def _read_spans(path: Path) -> tuple[list[Span], list[str]]:
    if not path.exists():
        return [], ["There is no events.jsonl, so what trainer and publisher did is not shown."]
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [_span(line) for line in lines]
    spans = [span for span in found if span is not None]
    if lost := len(lines) - len(spans):
        return spans, [f"{lost} of {len(lines)} lines of events.jsonl could not be read; what they told is not shown."]
    return spans, []


def _span(line: str) -> Span | None:
    """The span of a line; None where the line is torn or holds something else.

    Older runs name the fields `who` and `what`; both pairs of names are read.
    """
    try:
        row = json.loads(line)
        actor, activity = (row["actor"], row["activity"]) if "actor" in row else (row["who"], row["what"])
        start_s, end_s = float(row["start_s"]), float(row["end_s"])
    except (ValueError, KeyError, TypeError):
        return None
    if not (isinstance(actor, str) and isinstance(activity, str) and 0 <= end_s - start_s < math.inf):
        return None
    return Span(actor=actor, activity=activity, start_s=start_s, end_s=end_s)


def _steps(metrics: Sequence[Mapping[str, float]]) -> list[Step]:
    """Steps as their timelines had them; as long as the steps themselves in a run that recorded no timelines.

    None begins before the one before has ended: a row is written a moment, and not always the same, after its step.
    """
    found: list[Step] = []
    for row in metrics:
        length_s = row.get("timeline/elapsed_s", row.get("timing_s/step", 0.0))
        if length_s > 0 and "time_s" in row:
            end_s = row["time_s"]
            start_s = max(end_s - length_s, found[-1].end_s if found else -math.inf)
            if end_s > start_s:
                found.append(Step(number=int(row["step"]), start_s=start_s, end_s=end_s))
    return found
