"""Reads the recorded times of a run: spans, forwards of engines, starts and ends of steps.

Timelines of a few steps of a long run are cheap: only their spans and forwards are divided. `notes` has a sentence for
each part that is missing after a kill, a full disk or a run of an older version. The last step is always shown: if it
has too many forwards, they are thinned (`launcher.report.newest_forwards`).

A run directory can hold several starts, with other engines. Within a start, a step begins where the one before ended.
A pause between two steps is therefore taken as a new start.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from pydantic_core import from_json

from launcher.report.metric_table import MetricTable
from launcher.report.newest_forwards import NewestForwards, newest_forwards
from rollout.tracing.engine_speed import EngineSpeed, fit_speed
from rollout.tracing.forwards import Forwards
from rollout.tracing.timeline import GAP_S, EngineTimeline, Span, engine_timelines

MAX_FORWARD_BYTES = 64 << 20
"""Most bytes of forwards to show, the newest of all engines together."""

START_S = 5.0
"""Shortest pause between two steps that counts as a new start: Ray, trainer and engines start in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Start and end of a step; wall clock."""

    number: int
    """Counted from 0."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """Spans, forwards and steps of a whole run."""

    spans: Sequence[Span]
    """Ordered by start."""
    forwards: Sequence[Forwards]
    """Forwards by engine number."""
    forwards_each: int
    """Neighbouring forwards for which a record of `forwards` stands."""
    steps: Sequence[Step]
    """Those that are shown."""
    num_steps: int
    """Of the run, with those that are not shown."""
    speed: EngineSpeed | None
    """Speed of an engine, fitted to the forwards since the last start; None if there are too few."""
    notes: Sequence[str]

    @property
    def bounds_s(self) -> tuple[float, float] | None:
        """Earliest start and latest end of all spans and forwards; wall clock. None if nothing was recorded."""
        recorded = [forwards for forwards in self.forwards if len(forwards)]
        starts = [span.start_s for span in self.spans]
        starts += [float(forwards["started_at_s"].min()) for forwards in recorded]
        ends = [span.end_s for span in self.spans]
        ends += [float((forwards["started_at_s"] + forwards["seconds"]).max()) for forwards in recorded]
        return (min(starts), max(ends)) if starts and max(ends) > min(starts) else None

    def engines(self, start_s: float, end_s: float) -> list[EngineTimeline]:
        """Timeline of each engine from `start_s` to `end_s`."""
        return engine_timelines(
            [_near(forwards, start_s, end_s) for forwards in self.forwards],
            self.spans_within(start_s, end_s),
            start_s=start_s,
            end_s=end_s,
            speed=self.speed,
        )

    def at_work(self, start_s: float, end_s: float) -> list[int]:
        """Numbers of the engines that ran a forward from `start_s` to `end_s`; wall clock.

        The others may be engines of an earlier start, which had more of them.
        """
        return [
            number
            for number, forwards in enumerate(self.forwards)
            if ((forwards["started_at_s"] < end_s) & (forwards["started_at_s"] + forwards["seconds"] > start_s)).any()
        ]

    @property
    def starts_s(self) -> list[float]:
        """When the first step of each start of the run began, but for the first start; wall clock."""
        return _starts_s(self.steps)

    def spans_within(self, start_s: float, end_s: float) -> list[Span]:
        """Spans that overlap the time from `start_s` to `end_s`, ordered by start."""
        return [span for span in self.spans if span.end_s > start_s and span.start_s < end_s]

    def newest(self, num_steps: int) -> "RunTimeline":
        """The last `num_steps` steps, and what was recorded since the first of them began; the whole run if shorter."""
        if len(self.steps) <= num_steps:
            return self
        steps = self.steps[-num_steps:]
        start_s = steps[0].start_s
        return replace(
            self,
            spans=[span for span in self.spans if span.end_s > start_s],
            forwards=[_near(forwards, start_s, math.inf) for forwards in self.forwards],
            steps=steps,
            notes=[*self.notes, f"Only the newest {num_steps} of {self.num_steps} steps are shown."],
        )


def _near(forwards: Forwards, start_s: float, end_s: float) -> Forwards:
    """Forwards within a time, and those so close to it that nothing but host work lies between."""
    starts = forwards["started_at_s"]
    return np.asarray(forwards[(starts + forwards["seconds"] > start_s - GAP_S) & (starts < end_s + GAP_S)])


def read_timeline(run_dir: Path, metrics: MetricTable) -> RunTimeline:
    """The timeline of a run."""
    spans, notes = _read_spans(run_dir / "events.jsonl")
    steps = all_steps = _steps(metrics)
    since_s = steps[-1].start_s if steps else math.inf
    found = newest_forwards(run_dir / "traces", since_s=since_s, max_bytes=MAX_FORWARD_BYTES)
    if found.num_damaged:
        notes += [f"{found.num_damaged} forwards of engines have damaged times and are not shown."]
    starts_s = [float(forwards["started_at_s"][0]) for forwards in found.by_engine if len(forwards)]
    if found.is_cut and starts_s:
        steps = [step for step in steps if step.start_s > max(starts_s)] or steps[-1:]
        begin_s = min([max(starts_s), *(step.start_s for step in steps[:1])])
        spans = [span for span in spans if span.end_s > begin_s]
        notes += _cut_notes(len(steps), found.forwards_each)
    speed, missing = _fitted(found, max(_starts_s(steps), default=-math.inf))
    return RunTimeline(
        spans=sorted(spans, key=lambda span: span.start_s),
        forwards=found.by_engine,
        forwards_each=found.forwards_each,
        steps=steps,
        num_steps=len(all_steps),
        speed=speed,
        notes=[*notes, *missing],
    )


def _cut_notes(num_steps: int, forwards_each: int) -> list[str]:
    """Sentences about forwards that are not shown; `num_steps` is the number of steps that are."""
    shown = {0: "", 1: "; only the newest step is shown"}
    about_steps = shown.get(num_steps, f"; only the newest {num_steps} steps are shown")
    notes = [f"Older forwards were removed or are too many to show{about_steps}."]
    if forwards_each > 1:
        notes.append(
            "The last step has too many forwards to show each. They were left out evenly: each one shown stands for "
            f"{forwards_each} in a row."
        )
    return notes


def _fitted(found: NewestForwards, last_start_s: float) -> tuple[EngineSpeed | None, list[str]]:
    """Speed of the engines since the last start of the run, and a sentence if it is unknown."""
    if not any(len(forwards) for forwards in found.by_engine):
        return None, ["No forwards of engines were recorded, so the work of engines is not shown."]
    recent = np.concatenate([forwards[forwards["started_at_s"] >= last_start_s] for forwards in found.by_engine])
    recent["seconds"] /= found.forwards_each
    if (speed := fit_speed(recent)) is not None:
        return speed, []
    since = " since the last start" if last_start_s > -math.inf else ""
    return None, [f"{len(recent)} forwards{since} are too few to fit the speed of the engines."]


def _read_spans(path: Path) -> tuple[list[Span], list[str]]:
    if not path.exists():
        return [], ["There is no events.jsonl, so the work of trainer and publisher is not shown."]
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    parsed = [_span(line) for line in lines]
    spans = [span for span in parsed if span is not None]
    if lost := len(lines) - len(spans):
        return spans, [f"{lost} of {len(lines)} lines of events.jsonl could not be read; their spans are not shown."]
    return spans, []


def _span(line: str) -> Span | None:
    """The span in a line; None if the line is incomplete or holds no span.

    Older runs name the fields `who` and `what`; both pairs of names are read.
    """
    try:
        row = from_json(line)
        actor, activity = (row["actor"], row["activity"]) if "actor" in row else (row["who"], row["what"])
        start_s, end_s = float(row["start_s"]), float(row["end_s"])
    except (ValueError, KeyError, TypeError):
        return None
    if not (isinstance(actor, str) and isinstance(activity, str) and 0 <= end_s - start_s < math.inf):
        return None
    return Span(actor=actor, activity=activity, start_s=start_s, end_s=end_s)


def _steps(metrics: MetricTable) -> list[Step]:
    """Steps from their metrics rows, each with the evaluation and the checkpoint before it.

    The end of a row of an older version is a varying moment late, so a start is never put before the end of the
    previous step.
    """
    lengths_s = metrics.seconds()
    rows, ends_s = metrics.column("time_s")
    steps: list[Step] = []
    for number, end_s, length_s in zip(
        metrics.filled("step")[rows].tolist(), ends_s.tolist(), lengths_s[rows].tolist(), strict=True
    ):
        start_s = max(end_s - length_s, steps[-1].end_s if steps else -math.inf)
        if length_s > 0 and end_s > start_s:
            steps.append(Step(number=int(number), start_s=start_s, end_s=end_s))
    return steps


def begins_start(before: Step, step: Step) -> bool:
    """Whether the run was started anew between two steps."""
    return step.start_s - before.end_s > START_S


def _starts_s(steps: Sequence[Step]) -> list[float]:
    """Begins of the first steps of later starts."""
    return [step.start_s for before, step in pairwise(steps) if begins_start(before, step)]
