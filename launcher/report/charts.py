"""Charts as HTML: lines or areas in an SVG that stretches, ticks and legend as text around it.

Text keeps its size on every screen, because only lines are stretched. Colours are classes, which the page's style
sets for light and for dark ground. A series beyond `launcher.report.thinning.MAX_POINTS` shows means, and for lines a
pale band from the lowest to the highest value.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.report.scale import Scale, figure, linear, logarithmic
from launcher.report.thinning import MAX_POINTS, Floats, Thinned, thin

SIDE = 1000
"""Width and height of the drawing, in its own units; whole numbers are finer than pixels."""
NUM_COLOURS = 7
"""Series colours of the page's style; later series repeat them."""
X_INTERVALS, Y_INTERVALS = 5, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series; both sequences have the same length."""

    label: str
    at: Sequence[float] | Floats
    values: Sequence[float] | Floats
    shown: str | None = None
    """The figure in the legend; None: the last value."""
    hint: str = ""
    """What a pointer on the legend shows."""
    colour: str = ""
    """Class of the page's style; empty for the next colour of the series."""


def line_chart(
    lines: Sequence[Line], *, log: bool = False, limit: float | None = None, over: str = "step", whole: bool = True
) -> str:
    """Lines, with the last value of each in the legend; empty without finite points.

    Args:
        lines: values that are not finite are left out; on a logarithmic axis also those that are not positive.
        log: logarithmic axis of values.
        limit: where a dashed line is drawn.
        over: name of the positions.
        whole: whether positions are whole numbers.
    """
    drawn = [(number, series) for number, line in enumerate(lines) if (series := _series(line, log=log)) is not None]
    if not drawn:
        return ""
    across = linear(
        min(series.at.min().item() for _, series in drawn),
        max(series.at.max().item() for _, series in drawn),
        intervals=X_INTERVALS,
        whole=whole,
    )
    extremes = [bound for _, series in drawn for bound in (series.lows.min().item(), series.highs.max().item())]
    if limit is not None:
        extremes.append(math.log10(limit) if log else limit)
    up = _up(min(extremes), max(extremes), log=log)
    marks = [_marks(series, across, up, _colour(lines[number], number)) for number, series in drawn]
    if limit is not None:
        y = _y(up, math.log10(limit) if log else limit)
        marks.append(f'<path class="limit" d="M0,{y}H{SIDE}"/>')
    return _frame("".join(marks), across, up, over) + _legend([(number, lines[number]) for number, _ in drawn])


def stacked_chart(lines: Sequence[Line], *, over: str = "step") -> str:
    """Parts of a sum at each step as areas, the first at the bottom; all have the same steps. Empty without steps.

    Values that are not finite, and those below 0, have no area. They count as 0, so other parts of their step stay.
    """
    if not lines or not len(lines[0].at):
        return ""
    parts = [thin(line.at, _heights(line)) for line in lines]
    at = parts[0].at
    across = linear(at[0].item() - 0.5, at[-1].item() + 0.5, intervals=X_INTERVALS, whole=True)
    tops = np.cumsum([part.means for part in parts], axis=0)
    up = linear(0.0, tops.max().item(), intervals=Y_INTERVALS, widen=True)
    middles = (at[:-1] + at[1:]) / 2
    edges = [_x(across, edge) for edge in [across.low, *middles.tolist(), across.high]]
    areas = []
    for number in reversed(range(len(lines))):  # a lower area covers the foot of the one above it
        corners = [f"V{_y(up, top)}H{edge}" for top, edge in zip(tops[number].tolist(), edges[1:], strict=True)]
        areas.append(f'<path class="area {_colour(lines[number], number)}" d="M0,{SIDE}{"".join(corners)}V{SIDE}Z"/>')
    return _frame("".join(areas), across, up, over) + _legend(list(enumerate(lines)))


def note(num_steps: int) -> str:
    """A paragraph for a page whose charts have that many steps; empty if they show every step."""
    if num_steps <= MAX_POINTS:
        return ""
    return (
        f'<p class="note">With more than {MAX_POINTS} steps, lines and areas show means of neighbouring steps. The '
        "pale band around a line reaches from their lowest value to their highest.</p>"
    )


def _series(line: Line, *, log: bool) -> Thinned | None:
    """The points of a line, logarithms on a logarithmic axis; None without any."""
    at, values = np.asarray(line.at, dtype=np.float64), np.asarray(line.values, dtype=np.float64)
    kept = np.isfinite(values) & ((values > 0) if log else True)
    if not kept.any():
        return None
    return thin(at[kept], np.log10(values[kept]) if log else values[kept])


def _heights(line: Line) -> Floats:
    """What a line adds to a stack at each step."""
    values = np.asarray(line.values, dtype=np.float64)
    return np.where(np.isfinite(values) & (values > 0), values, 0.0)


def _up(low: float, high: float, *, log: bool) -> Scale:
    if log:
        return logarithmic(10**low, 10**high, intervals=Y_INTERVALS)
    return linear(low, high, intervals=Y_INTERVALS, widen=True)


def _colour(line: Line, number: int) -> str:
    return line.colour or f"s{number % NUM_COLOURS}"


def _marks(series: Thinned, across: Scale, up: Scale, colour: str) -> str:
    """Band and line of one series; a series of one point is a dot."""
    at = [_x(across, position) for position in series.at.tolist()]
    means, lows, highs = (
        [f"{x},{_y(up, value)}" for x, value in zip(at, values.tolist(), strict=True)]
        for values in (series.means, series.lows, series.highs)
    )
    if len(means) == 1:
        return f'<path class="dot {colour}" d="M{means[0]}h0"/>'
    band = f'<polygon class="band {colour}" points="{" ".join([*highs, *reversed(lows)])}"/>'
    line = f'<polyline class="line {colour}" points="{" ".join(means)}"/>'
    return band + line if series.is_thinned else line


def _x(across: Scale, position: float) -> int:
    return round(SIDE * across.share(position))


def _y(up: Scale, value: float) -> int:
    return round(SIDE * (1 - up.share(value)))


def _frame(marks: str, across: Scale, up: Scale, over: str) -> str:
    rules = "".join(f"M0,{round(SIDE * (1 - share))}H{SIDE}" for share, _ in up.ticks)
    left = "".join(f'<span class="y" style="bottom:{100 * share:.4g}%">{label}</span>' for share, label in up.ticks)
    below = "".join(f'<span class="x" style="left:{100 * share:.4g}%">{label}</span>' for share, label in across.ticks)
    return (
        f'<div class="plot"><svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="grid-line" d="{rules}"/>{marks}</svg>{left}{below}'
        f'<span class="over">{html.escape(over)}</span></div>'
    )


def _legend(lines: Sequence[tuple[int, Line]]) -> str:
    items = []
    for number, line in lines:
        shown = figure(line.values[-1]) if line.shown is None else line.shown
        hint = f' title="{html.escape(line.hint)}"' if line.hint else ""
        items.append(
            f'<span{hint}><i class="{_colour(line, number)}"></i>{html.escape(line.label)} '
            f"<b>{html.escape(shown)}</b></span>"
        )
    return f'<div class="legend">{"".join(items)}</div>'
