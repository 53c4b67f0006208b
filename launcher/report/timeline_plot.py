"""Draws where the engines' time went: one row for each engine, then everybody else, over the last few steps.

A row of an engine is filled from below by what the engine did in each instant, so that a full engine is a dark block, a
draining one a dark block that shrinks below light blue, and a bubble is a block of another colour that says what was
waited for. Rows of trainer, publisher and evaluation are blank where nothing of theirs goes on.
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
"""Heights inside a row: more would not be seen, and equal neighbours are one corner less."""
MAX_ENGINES = 12
"""Rows that stay readable; further engines are in `timeline.json`."""
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
DONE = {
    "train": ("trains", "#059669"),
    "publish": ("publishes", "#7c3aed"),
    "checkpoint": ("saves", "#475569"),
    "switch": ("changes memory", "#f59e0b"),
    "evaluate": ("evaluates", "#0e7490"),
}
"""Label and colour of what is done beside sampling, by span."""


def engine_rows(name: str, run: RunTimeline, steps: Sequence[Step]) -> str:
    """One `<svg>` of `steps`, which follow each other; `name` must be unique in the page."""
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    engines = run.engines(start_s, end_s)[:MAX_ENGINES]
    spans = [span for span in run.spans if span.activity in DONE and span.end_s > start_s and span.start_s < end_s]
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
            axes.broken_barh([(begin, end - begin)], (bottom, 0.8), color=DONE[span.activity][1], linewidth=0)
        _steps(axes, steps, start_s)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, end_s - start_s)
        axes.set_xlabel("seconds")
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        # without a speed nobody knows how full an engine was that ran
        labels = LABELS if run.speed is not None else {**LABELS, Part.SATURATED: "runs forwards"}
        handles = [Patch(color=COLOURS[part], label=labels[part]) for part in PARTS if part in seen]
        done = {span.activity for span in spans}
        handles += [Patch(color=colour, label=label) for name, (label, colour) in DONE.items() if name in done]
        figure.legend(handles=handles, frameon=False, fontsize=8, ncols=6, loc="outside upper left")
        return _svg(figure)


def _fill_row(axes: Axes, row: int, edges: Floats, shares: Floats) -> None:
    """One engine as parts on top of each other, between `row - 0.4` and `row + 0.4`."""
    until = np.concatenate([np.zeros((len(shares), 1)), np.cumsum(shares, axis=1)], axis=1)
    levels = row + 0.4 - 0.8 * np.round(until * NUM_LEVELS) / NUM_LEVELS
    for index, part in enumerate(PARTS):
        bottom, top = levels[:, index], levels[:, index + 1]
        outlines = [_outline(edges, bottom, top, first, last) for first, last in _runs(bottom != top)]
        axes.add_collection(PolyCollection(outlines, facecolors=COLOURS[part], edgecolors="none"), autolim=False)


def _runs(holds: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Longest stretches in which it holds, as (first, one behind the last)."""
    changes = np.flatnonzero(np.diff(holds, prepend=False, append=False)).tolist()
    return list(zip(changes[::2], changes[1::2], strict=True))


def _outline(edges: Floats, bottom: Floats, top: Floats, first: int, last: int) -> Floats:
    """The steps of bins `first` to `last` as one polygon, corners only, [corners, 2]."""
    return np.concatenate([_steps_of(edges, bottom, first, last), _steps_of(edges, top, first, last)[::-1]])


def _steps_of(edges: Floats, level: Floats, first: int, last: int) -> Floats:
    cuts = first + np.flatnonzero(np.diff(level[first:last])) + 1
    at = edges[np.r_[first, np.repeat(cuts, 2), last]]
    return np.stack([at, level[np.repeat(np.r_[first, cuts], 2)]], axis=1)


def _actor(span: Span) -> str:
    """The row of a span; engines change their memory for a publish."""
    if span.activity == "evaluate":
        return "evaluation"
    return "trainer" if span.actor == "trainer" else "publisher"


def _steps(axes: Axes, steps: Sequence[Step], start_s: float) -> None:
    """A line where a step begins, and its number above the rows."""
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
    """Matplotlib writes six digits; a hundredth of a point is not seen."""
    return re.sub(r"(\.\d\d)\d+", r"\1", path)
