"""Draws every engine and every trainer rank of a run as a lane, grouped by node, over the last few steps.

An engine's lane has, at each moment, the colour of the part that takes most of it (`launcher.report.timeline_plot` has
the colours). Trainer ranks work together, so all their lanes show the same phases. A slow node shows as lanes that
differ from those of other nodes. Lanes are HTML, so that names stay readable on a narrow screen.
"""

import html
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from launcher.report.html import section
from launcher.report.run_timeline import RunTimeline, Step
from launcher.report.timeline_plot import ACTIVITIES, COLOURS, LABELS
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
    trainer = _svg(_trainer_bars(run, start_s, end_s))
    nodes = []
    for node, ranks, numbers in places.by_node():
        lanes = [_lane(f"trainer {rank}", trainer) for rank in ranks]
        lanes += [
            _lane(f"engine {number}", _svg(_engine_bars(engines[number], edges_s)))
            for number in numbers
            if number < len(engines)
        ]
        nodes.append(f'<div class="card"><p>{html.escape(node or "this machine")}</p>{"".join(lanes)}</div>')
    title = f"steps {steps[0].number + 1} to {steps[-1].number + 1}, {end_s - start_s:.0f} s"
    return section("Fleet", f"<p>{title}</p>{_legend()}{''.join(nodes)}")


def _engine_bars(engine: EngineTimeline, edges_s: npt.NDArray[np.float64]) -> Iterator[tuple[float, float, str]]:
    """(begin, end, colour) of neighbouring moments with the same part, in bins."""
    shares = engine.binned(edges_s)
    parts = np.where(shares.sum(axis=1) > 0, shares.argmax(axis=1), -1)
    cuts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
    for begin, end in pairwise(cuts):
        if parts[begin] >= 0:
            yield begin, end, COLOURS[PARTS[parts[begin]]]


def _trainer_bars(run: RunTimeline, start_s: float, end_s: float) -> Iterator[tuple[float, float, str]]:
    """(begin, end, colour) of the phases in which the trainer works, in bins."""
    scale = NUM_BINS / (end_s - start_s)
    for span in run.spans:
        if span.activity in TRAINER_ACTIVITIES and span.end_s > start_s and span.start_s < end_s:
            begin, end = max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s
            yield begin * scale, end * scale, ACTIVITIES[span.activity][1]


def _svg(bars: Iterator[tuple[float, float, str]]) -> str:
    drawn = "".join(
        f'<rect x="{begin:.4g}" width="{max(end - begin, 0.3):.4g}" height="1" fill="{colour}"/>'
        for begin, end, colour in bars
    )
    return f'<svg viewBox="0 0 {NUM_BINS} 1" preserveAspectRatio="none" role="img">{drawn}</svg>'


def _lane(name: str, svg: str) -> str:
    return f'<div class="lane"><span>{name}</span>{svg}</div>'


def _legend() -> str:
    entries = [(COLOURS[part], LABELS[part]) for part in PARTS]
    entries += [(ACTIVITIES[activity][1], f"trainer {ACTIVITIES[activity][0]}") for activity in TRAINER_ACTIVITIES]
    items = "".join(f'<span><i style="background:{colour}"></i>{label}</span>' for colour, label in entries)
    return f'<div class="legend">{items}</div>'
