"""The timeline of a run while it goes on: what a step's metrics say of its engines' time.

Steps follow each other without a gap: one lasts from the record of the step before to its own, and so holds the
evaluation and the checkpoint that came before it; the first begins with its rollout, and what comes before that is
set-up. Spans and forwards are forgotten when they have ended with a step; a span that is still open when a step is
recorded counts in the next one from where that begins.
"""

from collections.abc import Sequence

import numpy as np

from rollout.tracing.engine_speed import MAX_FITTED, EngineSpeed, fit_speed
from rollout.tracing.forwards import FORWARD, Forwards
from rollout.tracing.timeline import Span, engine_timelines, timeline_metrics

FITTED_PER_STEP = MAX_FITTED // 8
"""Forwards of a step, evenly spread over it, that the speed of later steps is fitted to, too."""


class StepTimeline:
    """Collects what actors did, and closes one step after another."""

    def __init__(self, num_engines: int) -> None:
        self._forwards: list[Forwards] = [np.zeros(0, dtype=FORWARD) for _ in range(num_engines)]
        self._spans: list[Span] = []
        self._evidence: Forwards = np.zeros(0, dtype=FORWARD)
        """The newest forwards of this process, at most `MAX_FITTED`."""
        self._closed_s: float | None = None
        self.speed: EngineSpeed | None = None
        """As of the last step that was closed; None while there is too little evidence."""

    def add_span(self, actor: str, activity: str, start_s: float, end_s: float) -> None:
        """Add an activity of an actor; wall clock."""
        self._spans.append(Span(actor=actor, activity=activity, start_s=start_s, end_s=end_s))

    def add_forwards(self, forwards: Sequence[Forwards]) -> None:
        """What each engine has run since the last call."""
        self._forwards = [np.concatenate(pair) for pair in zip(self._forwards, forwards, strict=True)]
        new = np.concatenate(forwards)
        thinned = new[:: max(1, -(-len(new) // FITTED_PER_STEP))]
        self._evidence = np.concatenate([self._evidence, thinned])[-MAX_FITTED:]

    def close(self, end_s: float, step_s: float) -> dict[str, float]:
        """Metrics of the step that ends at `end_s`; `step_s` is how long it took by itself.

        See `rollout.tracing.timeline.timeline_metrics`.
        """
        start_s = end_s - step_s if self._closed_s is None else self._closed_s
        self._closed_s = end_s
        if not end_s > start_s:  # somebody has set the clock back
            return {}
        self.speed = fit_speed(self._evidence)
        engines = engine_timelines(self._forwards, self._spans, start_s=start_s, end_s=end_s, speed=self.speed)
        self._spans = [span for span in self._spans if span.end_s > end_s]
        self._forwards = [of_one[_first_kept(of_one, end_s) :] for of_one in self._forwards]
        return timeline_metrics(engines, self.speed)


def _first_kept(forwards: Forwards, end_s: float) -> int:
    """The last forward that ended before `end_s`: the next step must see how long ago that was."""
    going_on = np.flatnonzero(forwards["started_at_s"] + forwards["seconds"] > end_s)
    return max(0, int(going_on[0] if len(going_on) else len(forwards)) - 1)
