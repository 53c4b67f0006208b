"""Draws the engines' time over the last few steps: a lane per engine, then trainer, publisher and evaluation.

An engine without a forward in these steps has no lane: it is one of an earlier start, or one that was given up.

The height of a colour in an engine's lane is the share of the engine's time at that instant. A saturated engine is dark
blue, an under-filled one partly light blue; each kind of wait has a colour of its own. Lanes of trainer, publisher and
evaluation are blank between their spans.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from launcher.report.lanes import (
    ACTIVITY_LABELS,
    LEVELS,
    PART_COLOURS,
    PART_LABELS,
    areas,
    axis,
    bars,
    lane,
    legend,
    seconds_axis,
)
from launcher.report.run_timeline import RunTimeline, Step
from rollout.tracing.timeline import PARTS, Part, Span

NUM_BINS = 400
MAX_ENGINES = 12
"""Most readable rows; the fleet and `timeline.json` have all engines."""


def engine_rows(run: RunTimeline, steps: Sequence[Step]) -> str:
    """Lanes of consecutive `steps`, with their legend; of engines that ran a forward in them."""
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    edges_s = np.linspace(start_s, end_s, NUM_BINS + 1)
    begins = "".join(
        f'<path class="grid-line" d="M{NUM_BINS * (step.start_s - start_s) / (end_s - start_s):.4g},0V{LEVELS}"/>'
        for step in steps[1:]
    )
    seen: set[Part] = set()
    lanes = [axis("", _numbers(steps))]
    engines = run.engines(start_s, end_s)
    for number in run.at_work(start_s, end_s)[:MAX_ENGINES]:
        shares = engines[number].binned(edges_s)
        seen |= {part for part, column in zip(PARTS, shares.T, strict=True) if column.any()}
        lanes.append(lane(f"engine {number}", areas(shares) + begins, num_bins=NUM_BINS))
    spans = [span for span in run.spans_within(start_s, end_s) if span.activity in ACTIVITY_LABELS]
    for actor in ("trainer", "publisher", "evaluation"):
        of_actor = [span for span in spans if _actor(span) == actor]
        if of_actor or actor != "evaluation":
            pieces = bars(activity_bars(of_actor, start_s, end_s, num_bins=NUM_BINS))
            lanes.append(lane(actor, pieces + begins, num_bins=NUM_BINS))
    lanes.append(seconds_axis(end_s - start_s))
    shown = {span.activity for span in spans}
    return f'<div class="lanes tall">{"".join(lanes)}</div>{_legend(run, seen, shown)}'


def activity_bars(
    spans: Sequence[Span], start_s: float, end_s: float, *, num_bins: int
) -> Iterator[tuple[float, float, str]]:
    """Begin and end in bins, and colour, of spans that overlap the time from `start_s` to `end_s`."""
    scale = num_bins / (end_s - start_s)
    for span in spans:
        begin, end = max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s
        yield begin * scale, end * scale, span.activity


def _actor(span: Span) -> str:
    """The lane of a span; memory changes of engines belong to a publish."""
    if span.activity == "evaluate":
        return "evaluation"
    return "trainer" if span.actor == "trainer" else "publisher"


def _numbers(steps: Sequence[Step]) -> Iterator[tuple[float, str]]:
    """The middle of each step, and its number."""
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    for step in steps:
        yield ((step.start_s + step.end_s) / 2 - start_s) / (end_s - start_s), f"step {step.number + 1}"


def _legend(run: RunTimeline, seen: set[Part], activities: set[str]) -> str:
    # without a fitted speed, saturated and under-filled forwards cannot be told apart
    labels = PART_LABELS if run.speed is not None else {**PART_LABELS, Part.SATURATED: "runs forwards"}
    entries = [(PART_COLOURS[part], labels[part]) for part in PARTS if part in seen]
    entries += [(activity, label) for activity, label in ACTIVITY_LABELS.items() if activity in activities]
    return legend(entries)
