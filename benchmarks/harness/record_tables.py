"""Summarises rows of a record as a Markdown table: one line per group of rows, with medians in its cells."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.harness.record_file import Row

Value = str | int | float | bool
_REDUCED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "least": min,
    "most": max,
    "count": len,
}
EMPTY = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    field: str
    title: str
    scale: float = 1.0
    """Factor from the field's unit to the title's unit."""
    reduce: Literal["median", "least", "most", "count"] = "median"
    """How the values of a line's rows are combined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A selection of rows and their columns."""

    title: str
    lines: Mapping[str, str]
    """Fields that identify a line, with their headings; empty: one line for all rows."""
    columns: Sequence[Column]
    where: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """Allowed values by field; rows need one of them."""
    without: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """Excluded values by field."""
    across: str = ""
    """Field whose values each get separate columns; empty: no such field."""
    may_be_empty: bool = False
    """Whether a record may have no such rows; the page then lacks the table."""

    def selects(self, row: Row) -> bool:
        """Whether the table contains a row."""
        return (
            all(name in row and row[name] in values for name, values in self.where.items())
            and not any(row.get(name) in values for name, values in self.without.items())
            and any(column.field in row for column in self.columns)
        )

    def markdown(self, rows: Sequence[Row]) -> Iterator[str]:
        """Lines of the table for a record's rows."""
        chosen = [row for row in rows if self.selects(row)]
        by_line: dict[tuple[str, ...], list[Row]] = {}
        for row in chosen:
            by_line.setdefault(tuple(shown(row.get(name, "")) for name in self.lines), []).append(row)
        across = list(dict.fromkeys(row[self.across] for row in chosen)) if self.across else [None]
        if not any(isinstance(value, str) for value in across):
            across.sort(key=lambda value: 0.0 if value is None else float(value))
        headings = [
            *self.lines.values(),
            *(self._heading(column, value) for value in across for column in self.columns),
        ]
        yield from (_line(headings), _line(["---"] * len(headings)))
        for key, of_line in by_line.items():
            cells = (self._cell(column, value, of_line) for value in across for column in self.columns)
            yield _line([*key, *cells])

    def _heading(self, column: Column, value: Value | None) -> str:
        if value is None:
            return column.title
        return f"{column.title}, {shown(value)}" if len(self.columns) > 1 else shown(value)

    def _cell(self, column: Column, value: Value | None, rows: Sequence[Row]) -> str:
        values = [
            float(row[column.field]) * column.scale
            for row in rows
            if column.field in row and (value is None or row[self.across] == value)
        ]
        return shown(_REDUCED[column.reduce](values)) if values else EMPTY


def shown(value: Value) -> str:
    """A value as text; numbers have three significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):
        return EMPTY
    return number(value, digits=3)


def number(value: float, *, digits: int) -> str:
    """A number as text: whole numbers in full, others rounded, with an exponent only if they are tiny."""
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
