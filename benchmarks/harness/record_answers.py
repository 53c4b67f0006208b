"""The one-sentence answer of a record's page: a sentence with gaps, which figures and goals of the record fill.

A sentence holds no figure and no verdict of its own, so it cannot contradict its record.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.record_file import Record, Row
from benchmarks.harness.record_tables import Value, number

Figure = Callable[[Record], float]
_DIGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A sentence with named gaps."""

    text: str
    """Has the gap `{name}` for each figure, and the gap `{verdict}` if there is a verdict."""
    figures: Mapping[str, Figure]
    verdict: tuple[str, str] | None = None
    """Words for a record that meets all its goals, and for one that misses any."""

    def of(self, record: Record) -> str:
        """The sentence with a record's figures and its verdict.

        Raises:
            ValueError: the record lacks a goal or row that a figure names, or has no goals for the verdict.
        """
        shown = {name: number(figure(record), digits=_DIGITS) for name, figure in self.figures.items()}
        if self.verdict is not None:
            if not record.goals:
                raise ValueError(f"record {record.name} has no goals; the verdict of its answer needs some")
            met, missed = self.verdict
            shown["verdict"] = met if all(item.met for item in record.goals) else missed
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
        return statistics.median(float(row[field]) for row in _rows(record, field, where)) * scale

    return value


def largest(field: str, where: Mapping[str, Sequence[Value]]) -> Figure:
    """The largest value of a field over the rows with one of the values that `where` names."""
    return lambda record: max(float(row[field]) for row in _rows(record, field, where))


def largest_median(field: str, where: Mapping[str, Sequence[Value]], *, by: str, begins: str) -> Figure:
    """As `median`, but the largest over the values of the field `by` that begin with the text `begins`."""

    def value(record: Record) -> float:
        values: dict[str, list[float]] = {}
        for row in _rows(record, field, where):
            if str(row.get(by, "")).startswith(begins):
                values.setdefault(str(row[by]), []).append(float(row[field]))
        if not values:
            raise ValueError(f"record {record.name} has no row with {field!r} whose {by!r} begins with {begins!r}")
        return max(map(statistics.median, values.values()))

    return value


def first_of(*figures: Figure) -> Figure:
    """The first figure that the record has; a later one is that of an older form of the record."""

    def value(record: Record) -> float:
        missing = []
        for figure in figures:
            try:
                return figure(record)
            except ValueError as error:
                missing.append(str(error))
        raise ValueError("; ".join(missing))

    return value


def _rows(record: Record, field: str, where: Mapping[str, Sequence[Value]]) -> list[Row]:
    rows = [row for row in record.rows if all(row.get(name) in allowed for name, allowed in where.items())]
    found = [row for row in rows if field in row]
    if not found:
        raise ValueError(f"record {record.name} has no row with {field!r} where {dict(where)}")
    return found
