"""What the page of a record shows, and columns that several pages have."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.record_tables import Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The page of one record."""

    question: str
    """What was measured, in a sentence."""
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    """What a reader must know to read the figures."""


MIB = 1 / (1 << 20)
TOKENS = Column(field="tokens_per_forward", title="tokens per forward")
UNRECORDED_WARM = "The seed of the quickstart that gave the warm start was not recorded."


def percent(field: str, title: str) -> Column:
    """A share, in percent."""
    return Column(field=field, title=f"{title}, %", scale=100.0)


def milliseconds(field: str, title: str) -> Column:
    """Seconds, in milliseconds."""
    return Column(field=field, title=f"{title}, ms", scale=1e3)


def spread(field: str, title: str, *, scale: float = 1.0) -> tuple[Column, Column, Column]:
    """Least, median and most over the rows of a line."""
    return (
        Column(field=field, title=f"{title}, least", scale=scale, reduce="least"),
        Column(field=field, title=f"{title}, median", scale=scale),
        Column(field=field, title=f"{title}, most", scale=scale, reduce="most"),
    )
