"""Draws the pictures beside records as SVG text. matplotlib uses its file backend, so no display is needed."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GRID = "#334155", "#e2e8f0"
COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#64748b", "#0ea5e9")
WIDTH, HEIGHT = 5.4, 2.7
"""Inches of a picture whose legend has one row."""
ROW, WIDTH_OF_CHARACTER, LINE_AND_GAP, MOST_COLUMNS = 0.17, 0.066, 0.5, 4
"""Inches of a legend's row, of a mean character in it, and of the drawn line with the gap behind an entry."""
STYLE = {
    "svg.fonttype": "none",
    "font.family": ["sans-serif"],
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]


def lines(name: str, series: Sequence[Series], *, unit: str = "", log: bool = False, axis: str = "step") -> str:
    """Lines over `axis` as one `<svg>`; `name` seeds the identifiers in it, so that equal pictures are equal files."""

    def draw(axes: Axes) -> None:
        for colour, line in zip(COLOURS, series, strict=False):
            marker = "o" if len(line.steps) <= 40 else ""
            axes.plot(
                line.steps, line.values, color=colour, label=line.label, linewidth=1.8, marker=marker, markersize=3
            )
        if log:
            _decades(axes)
        axes.set_ylabel(unit)

    return _render(name, draw, labels=[each.label for each in series], axis=axis)


def _decades(axes: Axes) -> None:
    """A logarithmic axis over whole decades, with labels at decades only."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    axes.minorticks_off()


def _legend_columns(labels: Sequence[str]) -> int:
    """As many columns as fit above the chart: a wider legend would squeeze the chart."""
    column = LINE_AND_GAP + WIDTH_OF_CHARACTER * max(map(len, labels))
    return max(1, min(MOST_COLUMNS, int(WIDTH / column)))


def _render(name: str, draw: Callable[[Axes], None], *, labels: Sequence[str], axis: str) -> str:
    columns = _legend_columns(labels)
    rows = math.ceil(len(labels) / columns)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, HEIGHT + ROW * (rows - 1)), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xlabel(axis)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(labels) > 1:
            axes.legend(frameon=False, fontsize=8, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1))
        text = io.StringIO()
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
