"""Timeline metrics of a running run, one step after another.

Steps have no gaps between them: a step lasts from the record of the previous step to its own, and includes the
evaluation and the checkpoint before it. The first step begins with its rollout; earlier time is set-up. Spans and
forwards are dropped after the step in which they end. A span that is open at the end of a step counts in the next step
from the start of that step. An engine that was given up counts until the end of the step in which that happened. After
the loss of a trainer the time until the next step is in no step, as before a start.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np

from rollout.tracing.engine_speed import MAX_FITTED, EngineSpeed, fit_speed
from rollout.tracing.forwards import FORWARD, Forwards
from rollout.tracing.timeline import Span, engine_timelines, timeline_metrics

FITTED_PER_STEP = MAX_FITTED // 8
"""Forwards of a step, evenly spaced, that the speed fits of later steps use."""

BETWEEN_STEPS = ("evaluate", "checkpoint", "publish", "switch")
"""Activities that follow the row of a step, before the next step begins: engines that slept in a checkpoint get their
weights again. Those within a step are in its own row."""


class StepTimeline:
    """Collects spans and forwards, and computes the metrics of one step after another."""

    def __init__(self, num_engines: int) -> None:
        self._forwards: list[Forwards] = [np.zeros(0, dtype=FORWARD) for _ in range(num_engines)]
        self._spans: list[Span] = []
        self._evidence: Forwards = np.zeros(0, dtype=FORWARD)
        """The newest sampled forwards, at most `MAX_FITTED`."""
        self._given_up: frozenset[int] = frozenset()
        """Engines that were given up before this step."""
        self._closed_s: float | None = None
        self._between: list[Span] = []
        """Of `BETWEEN_STEPS`, since the last row and before the rollout of the next step."""
        self._is_between = True
        self.speed: EngineSpeed | None = None
        """Fitted at the end of the last step; None while there are too few forwards."""

    def add_span(self, actor: str, activity: str, start_s: float, end_s: float) -> None:
        """Add an activity of an actor; wall clock."""
        span = Span(actor=actor, activity=activity, start_s=start_s, end_s=end_s)
        self._spans.append(span)
        # by order: the wall clock may be set within a step
        self._is_between = self._is_between and activity != "rollout"
        if self._is_between and activity in BETWEEN_STEPS:
            self._between.append(span)

    def begin_anew(self) -> None:
        """A trainer is lost: what it had begun is in no step, and the next row is that of a start."""
        self._closed_s, self._spans, self._between, self._is_between = None, [], [], True

    def add_forwards(self, forwards: Sequence[Forwards]) -> None:
        """Add the forwards of each engine since the last call."""
        self._forwards = [np.concatenate(pair) for pair in zip(self._forwards, forwards, strict=True)]
        self._evidence = np.concatenate([self._evidence, *_thinned(forwards)])[-MAX_FITTED:]

    def close(self, end_s: float, step_s: float, *, retired: Collection[int] = ()) -> dict[str, float]:
        """Metrics of the step that ends at `end_s`; `step_s` is its duration without what came between the steps.

        An evaluation and a checkpoint follow the row of their step, so the next row holds their seconds
        (`timing_s/evaluate_before_step`), with those of `BETWEEN_STEPS`. Others:
        `rollout.tracing.timeline.timeline_metrics`. `retired`: numbers of the engines that were given up until now;
        they count in this step for the last time.
        """
        start_s = end_s - step_s if self._closed_s is None else self._closed_s
        self._closed_s = end_s
        kept = [number for number in range(len(self._forwards)) if number not in self._given_up]
        self._given_up = frozenset(retired)
        before = _before_step(self._between, end_s - step_s)
        self._between, self._is_between = [], True
        if not end_s > start_s:  # the wall clock was set back
            return {}
        self.speed = fit_speed(self._evidence)
        engines = engine_timelines(
            [self._forwards[number] for number in kept],
            self._spans,
            start_s=start_s,
            end_s=end_s,
            speed=self.speed,
            cut_at_forwards=False,
        )
        self._spans = [span for span in self._spans if span.end_s > end_s]
        # copies, so that the memory of the step's other forwards is given back
        self._forwards = [forwards[_first_of_next(forwards, end_s) :].copy() for forwards in self._forwards]
        return timeline_metrics(engines, self.speed) | before


def _thinned(forwards: Sequence[Forwards]) -> list[Forwards]:
    """At most `FITTED_PER_STEP` forwards, evenly spaced over those of all engines in turn, which are not copied."""
    lengths = [len(of_engine) for of_engine in forwards]
    every = max(1, -(-sum(lengths) // FITTED_PER_STEP))
    begins = accumulate(lengths, initial=0)
    return [of_engine[-begin % every :: every] for of_engine, begin in zip(forwards, begins, strict=False)]


def _before_step(between: Sequence[Span], begin_s: float) -> dict[str, float]:
    """Seconds of spans since the previous row, up to `begin_s`; absent where there were none.

    A publish within an evaluation or a checkpoint, to engines that were restarted, is a part of it.
    """
    seconds: dict[str, float] = {}
    for span in between:
        # the clock that measures a step and the wall clock differ, so the end of a span may lie behind the begin
        length_s = min(span.end_s, begin_s) - span.start_s
        if length_s > 0 and not any(_holds(other, span) for other in between):
            name = f"timing_s/{span.activity}_before_step"
            seconds[name] = seconds.get(name, 0.0) + length_s
    return seconds


def _holds(outer: Span, inner: Span) -> bool:
    return outer is not inner and outer.start_s <= inner.start_s and inner.end_s <= outer.end_s


def _first_of_next(forwards: Forwards, end_s: float) -> int:
    """Index of the last forward that ended before `end_s`, from which the next step measures its first gap."""
    unfinished = np.flatnonzero(forwards["started_at_s"] + forwards["seconds"] > end_s)
    return max(0, int(unfinished[0] if len(unfinished) else len(forwards)) - 1)
