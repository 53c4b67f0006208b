"""Axes: which positions get a tick, what the tick says, and where a value lies.

Ticks are multiples of 1, 2 or 5 times a power of ten. All labels of an axis share one unit (k, M, G, T or a power of
ten) and the same number of decimals.

Invariants: every tick lies within the axis; labels of neighbouring ticks differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SUFFIXES = {3: "k", 6: "M", 9: "G", 12: "T"}
SMALLEST_PLAIN, LARGEST_PLAIN = 1e-3, 1e4
"""Between them an axis has plain numbers."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One axis; of a logarithmic one, positions are decimal logarithms."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    """Share of the axis in [0, 1], and label."""

    def share(self, position: float) -> float:
        """Where a position lies, 0 at `low` and 1 at `high`."""
        return (position - self.low) / (self.high - self.low)


def linear(low: float, high: float, *, intervals: int, widen: bool = False, whole: bool = False) -> Scale:
    """About `intervals` ticks from `low` to `high`; `widen`: the axis ends at ticks, `whole`: ticks are integers."""
    if high <= low:
        low, high = _around(low, whole=whole)
    step = _step((high - low) / intervals)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - _ROUNDING), math.floor(high / step + _ROUNDING)
    if widen:
        first, last = math.floor(low / step + _ROUNDING), math.ceil(high / step - _ROUNDING)
        low, high = first * step, last * step
    values = [number * step for number in range(first, last + 1)]
    ticks = zip(values, _labels(values, step), strict=True)
    return Scale(low=low, high=high, ticks=[((value - low) / (high - low), label) for value, label in ticks])


def logarithmic(low: float, high: float, *, intervals: int) -> Scale:
    """An axis from `low` to `high` > 0 that ends at ticks: at decades, or also at their 2 and 5 within two decades."""
    first, last = math.floor(math.log10(low) + _ROUNDING), math.ceil(math.log10(high) - _ROUNDING)
    last = max(last, first + 1)
    every = max(1, math.ceil((last - first) / intervals))
    last = first + every * math.ceil((last - first) / every)
    digits = (1, 2, 5) if last - first <= 2 else (1,)
    marks = [(digit, power) for power in range(first, last, every) for digit in digits] + [(1, last)]
    values = [digit * 10.0**power for digit, power in marks]
    start = max(index for index, value in enumerate(values) if value <= low * (1 + 10 * _ROUNDING))
    end = min(index for index, value in enumerate(values) if value >= high * (1 - 10 * _ROUNDING) and index > start)
    left, right = math.log10(values[start]), math.log10(values[end])
    ticks = [
        ((math.log10(value) - left) / (right - left), _mark(value, *mark))
        for value, mark in zip(values[start : end + 1], marks[start : end + 1], strict=True)
    ]
    return Scale(low=left, high=right, ticks=ticks)


def _mark(value: float, digit: int, power: int) -> str:
    is_plain = value * (1 + _ROUNDING) >= SMALLEST_PLAIN and value < LARGEST_PLAIN
    return f"{value:g}" if is_plain else f"{digit}e{power}"


def figure(value: float) -> str:
    """One value, with four digits."""
    power = _power(abs(value))
    if power in SUFFIXES:
        return f"{value / 10.0**power:.4g}{SUFFIXES[power]}"
    return f"{value:.4g}"


def _around(value: float, *, whole: bool) -> tuple[float, float]:
    """A range for a single value: half a unit to both sides of a step, and from zero for quantities."""
    if whole:
        return value - 0.5, value + 0.5
    if value == 0:
        return 0.0, 1.0
    return min(0.0, 1.25 * value), max(0.0, 1.25 * value)


def _step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - _ROUNDING))


def _power(largest: float) -> int:
    """The power of ten of the unit for numbers up to `largest`; 0 for plain numbers."""
    if largest == 0 or SMALLEST_PLAIN <= largest < LARGEST_PLAIN or not math.isfinite(largest):
        return 0
    exponent = math.floor(math.log10(largest) + _ROUNDING)
    return min(3 * (exponent // 3), max(SUFFIXES)) if exponent > 0 else exponent


def _labels(values: Sequence[float], step: float) -> list[str]:
    power = _power(max(map(abs, values), default=0.0))
    unit = 10.0**power
    decimals = max(0, -math.floor(math.log10(step / unit) + _ROUNDING))
    suffix = SUFFIXES.get(power, f"e{power}" if power else "")
    return ["0" if abs(value) < step / 2 else f"{value / unit:.{decimals}f}{suffix}" for value in values]
