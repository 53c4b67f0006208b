"""Lanes: a name and a bar of time beside it, as HTML, so that names stay readable on a narrow screen.

A bar is cut into bins of equal length. It has one colour at a time, or areas whose height is a share of the time.
Colours are classes of the page's style.
"""

import html
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from launcher.report.scale import linear
from rollout.tracing.timeline import PARTS, Part

Floats = npt.NDArray[np.float64]

LEVELS = 50
"""Height of a lane in its own units: more are not visible, and equal neighbours need fewer corners."""
MIN_BINS = 0.3
"""Least width of a bar in bins, so that a short activity is visible."""
PART_COLOURS: Mapping[Part, str] = {
    Part.SATURATED: "saturated",
    Part.UNDERFILLED: "underfilled",
    Part.TAIL_WAIT: "tail-wait",
    Part.TRAINER_WAIT: "trainer-wait",
    Part.PUBLISH: "publish-wait",
    Part.GAP: "gap",
    Part.CHECKPOINT: "checkpoint-wait",
    Part.OTHER: "other",
}
PART_LABELS: Mapping[Part, str] = {
    Part.SATURATED: "saturated",
    Part.UNDERFILLED: "under-filled",
    Part.TAIL_WAIT: "idle: others still sample",
    Part.TRAINER_WAIT: "idle: trainer works",
    Part.PUBLISH: "idle: publish",
    Part.GAP: "between forwards",
    Part.CHECKPOINT: "idle: checkpoint",
    Part.OTHER: "idle: other",
}
ACTIVITY_LABELS: Mapping[str, str] = {
    "train": "trains",
    "publish": "publishes",
    "checkpoint": "saves",
    "switch": "changes memory",
    "evaluate": "evaluates",
}
"""Activities other than sampling, by the activity of their spans; each has a colour of its name."""


def bars(pieces: Iterable[tuple[float, float, str]]) -> str:
    """Begin and end in bins, and colour, of each piece of a lane."""
    return "".join(
        f'<rect x="{begin:.4g}" width="{max(end - begin, MIN_BINS):.4g}" height="{LEVELS}" class="{colour}"/>'
        for begin, end, colour in pieces
    )


def areas(shares: Floats) -> str:
    """Parts of each bin, [bins, parts], stacked from the bottom in the order of `PARTS`."""
    tops = np.round(np.cumsum(shares, axis=1) * LEVELS).astype(np.int64)
    drawn = []
    for index in reversed(range(len(PARTS))):  # a lower area covers the foot of the one above it
        if not shares[:, index].any():
            continue
        top = LEVELS - tops[:, index]
        starts = [0, *(np.flatnonzero(np.diff(top)) + 1).tolist()]
        corners = [f"V{top[start]}H{end}" for start, end in zip(starts, [*starts[1:], len(top)], strict=True)]
        drawn.append(f'<path class="area {PART_COLOURS[PARTS[index]]}" d="M0,{LEVELS}{"".join(corners)}V{LEVELS}Z"/>')
    return "".join(drawn)


def lane(name: str, drawing: str, *, num_bins: int) -> str:
    """One lane; `drawing` is a fragment of SVG in bins."""
    return (
        f'<div class="lane"><span>{html.escape(name)}</span><svg viewBox="0 0 {num_bins} {LEVELS}" '
        f'preserveAspectRatio="none" aria-hidden="true">{drawing}</svg></div>'
    )


def axis(name: str, labels: Iterable[tuple[float, str]]) -> str:
    """A line of labels above or below lanes, each at a share of the time in [0, 1]."""
    spans = "".join(f'<span style="left:{100 * share:.4g}%">{html.escape(label)}</span>' for share, label in labels)
    return f'<div class="lane axis"><span>{html.escape(name)}</span><div class="ticks">{spans}</div></div>'


def seconds_axis(seconds: float) -> str:
    """Ticks from 0 to `seconds`."""
    return axis("seconds", linear(0.0, seconds, intervals=5).ticks)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Colours and their labels."""
    items = "".join(f'<span><i class="{colour}"></i>{html.escape(label)}</span>' for colour, label in entries)
    return f'<div class="legend">{items}</div>'
