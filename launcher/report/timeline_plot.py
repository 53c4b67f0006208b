"""Draws the engines' time over the last few steps: a row per engine, then trainer, publisher and evaluation.

The height of a colour in an engine's row is the share of the engine's time at that instant. A saturated engine is dark
blue, an under-filled one partly light blue; each kind of wait has a colour of its own. Rows of trainer, publisher and
evaluation are blank between their spans.
"""

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from launcher.report.plots import GRID, STYLE
from launcher.report.run_timeline import RunTimeline, Step
from rollout.tracing.timeline import PARTS, Part, Span

Floats = npt.NDArray[np.float64]

NUM_BINS = 400
NUM_LEVELS = 50
"""Distinct heights inside a row: more are not visible, and equal neighbours need fewer corners."""
MAX_ENGINES = 12
"""Most readable rows; further engines are in `timeline.json`."""
COLOURS: Mapping[Part, str] = {
    Part.SATURATED: "#1d4ed8",
    Part.UNDERFILLED: "#93c5fd",
    Part.TAIL_WAIT: "#f87171",
    Part.TRAINER_WAIT: "#bbf7d0",
    Part.PUBLISH: "#ddd6fe",
    Part.GAP: "#fcd34d",
    Part.CHECKPOINT: "#94a3b8",
    Part.OTHER: "#e5e7eb",
}
LABELS: Mapping[Part, str] = {
    Part.SATURATED: "saturated",
    Part.UNDERFILLED: "under-filled",
    Part.TAIL_WAIT: "idle: others still sample",
    Part.TRAINER_WAIT: "idle: trainer works",
    Part.PUBLISH: "idle: publish",
    Part.GAP: "between forwards",
    Part.CHECKPOINT: "idle: checkpoint",
    Part.OTHER: "idle: other",
}
ACTIVITIES = {
    "train": ("trains", "#059669"),
    "publish": ("publishes", "#7c3aed"),
    "checkpoint": ("saves", "#475569"),
    "switch": ("changes memory", "#f59e0b"),
    "evaluate": ("evaluates", "#0e7490"),
}
"""Label and colour of activities other than sampling, by the activity of their spans."""


def engine_rows(name: str, run: RunTimeline, steps: Sequence[Step]) -> str:
    """One `<svg>` of consecutive `steps`; `name` must be unique in the page."""
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    engines = run.engines(start_s, end_s)[:MAX_ENGINES]
    spans = [
        span for span in run.spans if span.activity in ACTIVITIES and span.end_s > start_s and span.start_s < end_s
    ]
    actors = ["trainer", "publisher", *(["evaluation"] if any(span.activity == "evaluate" for span in spans) else [])]
    rows = [*(f"engine {number}" for number in range(len(engines))), *actors]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(11.2, 1.3 + 0.42 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        edges_s = np.linspace(start_s, end_s, NUM_BINS + 1)
        seen: set[Part] = set()
        for row, engine in enumerate(engines):
            shares = engine.binned(edges_s)
            seen |= {part for part, column in zip(PARTS, shares.T, strict=True) if column.any()}
            _fill_row(axes, row, edges_s - start_s, shares)
        for span in spans:
            begin, end = max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s
            bottom = rows.index(_actor(span)) - 0.4
            axes.broken_barh([(begin, end - begin)], (bottom, 0.8), color=ACTIVITIES[span.activity][1], linewidth=0)
        _steps(axes, steps, start_s)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, end_s - start_s)
        axes.set_xlabel("seconds")
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        # without a fitted speed, saturated and under-filled forwards cannot be told apart
        labels = LABELS if run.speed is not None else {**LABELS, Part.SATURATED: "runs forwards"}
        handles = [Patch(color=COLOURS[part], label=labels[part]) for part in PARTS if part in seen]
        shown = {span.activity for span in spans}
        handles += [Patch(color=colour, label=label) for name, (label, colour) in ACTIVITIES.items() if name in shown]
        figure.legend(handles=handles, frameon=False, fontsize=8, ncols=6, loc="outside upper left")
        return _svg(figure)


def _fill_row(axes: Axes, row: int, edges: Floats, shares: Floats) -> None:
    """Draw one engine's parts stacked between `row - 0.4` and `row + 0.4`."""
    until = np.concatenate([np.zeros((len(shares), 1)), np.cumsum(shares, axis=1)], axis=1)
    levels = row + 0.4 - 0.8 * np.round(until * NUM_LEVELS) / NUM_LEVELS
    for index, part in enumerate(PARTS):
        bottom, top = levels[:, index], levels[:, index + 1]
        outlines = [_outline(edges, bottom, top, first, last) for first, last in _runs(bottom != top)]
        axes.add_collection(PolyCollection(outlines, facecolors=COLOURS[part], edgecolors="none"), autolim=False)


def _runs(holds: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Maximal intervals of true values, as (first, last + 1)."""
    changes = np.flatnonzero(np.diff(holds, prepend=False, append=False)).tolist()
    return list(zip(changes[::2], changes[1::2], strict=True))


def _outline(edges: Floats, bottom: Floats, top: Floats, first: int, last: int) -> Floats:
    """The area between `bottom` and `top` of bins `first` to `last` as one polygon, [corners, 2]."""
    return np.concatenate([_steps_of(edges, bottom, first, last), _steps_of(edges, top, first, last)[::-1]])


def _steps_of(edges: Floats, level: Floats, first: int, last: int) -> Floats:
    cuts = first + np.flatnonzero(np.diff(level[first:last])) + 1
    at = edges[np.r_[first, np.repeat(cuts, 2), last]]
    return np.stack([at, level[np.repeat(np.r_[first, cuts], 2)]], axis=1)


def _actor(span: Span) -> str:
    """The row of a span; memory changes of engines belong to a publish."""
    if span.activity == "evaluate":
        return "evaluation"
    return "trainer" if span.actor == "trainer" else "publisher"


def _steps(axes: Axes, steps: Sequence[Step], start_s: float) -> None:
    """Draw a line at the start of each step, and its number above the rows."""
    for step in steps:
        axes.axvline(step.start_s - start_s, color=GRID, linewidth=1, zorder=0)
        middle = (step.start_s + step.end_s) / 2 - start_s
        axes.annotate(
            f"step {step.number + 1}",
            (middle, 1),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
        )


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    return re.sub(r' d="[^"]*"', lambda path: _shortened(path.group()), svg[svg.index("<svg") :])


def _shortened(path: str) -> str:
    """Shorten matplotlib's six digits to hundredths of a point, which are not visible."""
    return re.sub(r"(\.\d\d)\d+", r"\1", path)
