"""Line charts as inline SVG, written without matplotlib: a page of forty panels is ready in a second.

Colours of text and grid follow the page's style, so that a chart is readable on light and on dark ground. Long series
are thinned, so that a chart has a bounded size.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 58, 8, 8, 22
MAX_POINTS = 400
"""Most points of a line; a longer series is thinned evenly, and its last point is always drawn."""
COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#a78bfa", "#ef4444", "#94a3b8", "#06b6d4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart; both sequences have the same length."""

    label: str
    at: Sequence[float]
    values: Sequence[float]


def line_chart(lines: Sequence[Line], *, log: bool = False) -> str:
    """One `<svg>` with a legend under it if there are several lines; empty without finite points."""
    drawn = [(number, points) for number, line in enumerate(lines) if (points := _points(line, log=log))]
    if not drawn:
        return ""
    every = [point for _, points in drawn for point in points]
    left, right = _bounds([at for at, _ in every])
    low, high = _bounds([value for _, value in every])
    scale_x = (WIDTH - LEFT - RIGHT) / (right - left)
    scale_y = (HEIGHT - TOP - BOTTOM) / (high - low)
    paths = []
    for number, points in drawn:
        pairs = (f"{LEFT + (at - left) * scale_x:.1f},{TOP + (high - value) * scale_y:.1f}" for at, value in points)
        colour = COLOURS[number % len(COLOURS)]
        paths.append(f'<polyline points="{" ".join(pairs)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{_axes((left, right), (low, high), log=log)}'
        f"{''.join(paths)}</svg>{_legend(lines, [number for number, _ in drawn])}"
    )


def _points(line: Line, *, log: bool) -> list[tuple[float, float]]:
    pairs = zip(line.at, line.values, strict=True)
    points = [
        (at, math.log10(value) if log else value)
        for at, value in pairs
        if math.isfinite(value) and (value > 0 or not log)
    ]
    every = max(1, -(-len(points) // MAX_POINTS))
    return [*points[:-1:every], *points[-1:]]


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest value, apart from each other."""
    low, high = min(values), max(values)
    if high > low:
        return low, high
    margin = abs(low) / 2 or 1.0
    return low - margin, high + margin


def _axes(across: tuple[float, float], up: tuple[float, float], *, log: bool) -> str:
    """Grid lines and labels at four heights, and the first and the last position."""
    parts = []
    for index in range(4):
        share = index / 3
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        value = up[0] + share * (up[1] - up[0])
        parts.append(f'<line class="grid-line" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 3.5, f"{10**value if log else value:.3g}", anchor="end"))
    parts.append(_text(LEFT, HEIGHT - 6, _position(across[0]), anchor="start"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 6, _position(across[1]), anchor="end"))
    return "".join(parts)


def _position(value: float) -> str:
    """A step as a whole number, hours with four digits."""
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _legend(lines: Sequence[Line], drawn: Sequence[int]) -> str:
    if len(lines) < 2:
        return ""
    items = "".join(
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{html.escape(lines[number].label)}</span>'
        for number in drawn
    )
    return f'<div class="legend">{items}</div>'
