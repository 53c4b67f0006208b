"""The one-sentence answer of a record's page: a sentence with gaps, which figures of the record fill.

A sentence holds no figure of its own, so it cannot contradict its record.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.record_file import Record
from benchmarks.harness.record_tables import Value, number

Figure = Callable[[Record], float]
_DIGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A sentence with named gaps."""

    text: str
    """Has the gap `{name}` for each figure."""
    figures: Mapping[str, Figure]

    def of(self, record: Record) -> str:
        """The sentence with a record's figures.

        Raises:
            ValueError: the record lacks a goal or row that a figure names.
        """
        shown = {name: number(figure(record), digits=_DIGITS) for name, figure in self.figures.items()}
        return self.text.format(**shown)


def goal(name: str, *, scale: float = 1.0) -> Figure:
    """The value of a goal, multiplied by `scale`."""

    def value(record: Record) -> float:
        values = [item.value for item in record.goals if item.name == name]
        if len(values) != 1:
            raise ValueError(f"record {record.name} has {len(values)} goals {name!r}; its answer needs exactly one")
        return values[0] * scale

    return value


def median(field: str, where: Mapping[str, Sequence[Value]], *, scale: float = 1.0) -> Figure:
    """The median of a field over the rows with one of the values that `where` names, multiplied by `scale`."""

    def value(record: Record) -> float:
        rows = [row for row in record.rows if all(row.get(name) in allowed for name, allowed in where.items())]
        values = [float(row[field]) for row in rows if field in row]
        if not values:
            raise ValueError(f"record {record.name} has no row with {field!r} where {dict(where)}")
        return statistics.median(values) * scale

    return value
