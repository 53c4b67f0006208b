"""Draws every engine and every trainer rank of a run as a lane, grouped by node, over the last few steps.

An engine's lane has, at each moment, the colour of the part that takes most of it. Trainer ranks work together, so all
their lanes show the same phases. A slow node shows as lanes that differ from those of other nodes.
"""

import html
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from launcher.report.html import section
from launcher.report.lanes import (
    ACTIVITY_LABELS,
    PART_COLOURS,
    PART_LABELS,
    Floats,
    bars,
    lane,
    legend,
    seconds_axis,
)
from launcher.report.run_timeline import RunTimeline, Step
from launcher.report.timeline_plot import activity_bars
from launcher.run_dir.places import Places
from rollout.tracing.timeline import PARTS, EngineTimeline

NUM_BINS = 240
TRAINER_ACTIVITIES = ("train", "publish", "checkpoint")
"""Activities in which trainer ranks take part."""


def fleet_section(run: RunTimeline, places: Places | None, steps: Sequence[Step]) -> str:
    """The section; empty without steps, or for a run whose places are unknown."""
    if places is None or not steps:
        return ""
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    engines = run.engines(start_s, end_s)
    edges_s = np.linspace(start_s, end_s, NUM_BINS + 1)
    spans = [span for span in run.spans_within(start_s, end_s) if span.activity in TRAINER_ACTIVITIES]
    trainer = bars(activity_bars(spans, start_s, end_s, num_bins=NUM_BINS))
    below = seconds_axis(end_s - start_s)
    nodes = []
    for node, ranks, numbers in places.by_node():
        lanes = [lane(f"trainer {rank}", trainer, num_bins=NUM_BINS) for rank in ranks]
        lanes += [
            lane(f"engine {number}", bars(_engine_bars(engines[number], edges_s)), num_bins=NUM_BINS)
            for number in numbers
            if number < len(engines)
        ]
        name = html.escape(node or "this machine")
        nodes.append(f'<div class="card"><p>{name}</p><div class="lanes">{"".join(lanes)}{below}</div></div>')
    title = f"Steps {steps[0].number + 1} to {steps[-1].number + 1}; each lane has the colour of most of its time."
    return section("Fleet", f'<p class="note">{title}</p>{_legend()}<div class="grid">{"".join(nodes)}</div>')


def _engine_bars(engine: EngineTimeline, edges_s: Floats) -> Iterator[tuple[float, float, str]]:
    """(begin, end, colour) of neighbouring moments with the same part, in bins."""
    shares = engine.binned(edges_s)
    parts = np.where(shares.sum(axis=1) > 0, shares.argmax(axis=1), -1)
    cuts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
    for begin, end in pairwise(cuts):
        if parts[begin] >= 0:
            yield begin, end, PART_COLOURS[PARTS[parts[begin]]]


def _legend() -> str:
    entries = [(PART_COLOURS[part], PART_LABELS[part]) for part in PARTS]
    entries += [(activity, f"trainer {ACTIVITY_LABELS[activity]}") for activity in TRAINER_ACTIVITIES]
    return legend(entries)
