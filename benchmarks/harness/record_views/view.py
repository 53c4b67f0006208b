"""Contents of a record's page, and columns that several pages share."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.record_answers import Answer
from benchmarks.harness.record_file import Record
from benchmarks.harness.record_notes import Note, has_input
from benchmarks.harness.record_tables import Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The page of one record."""

    question: str
    answer: Answer
    """One sentence that answers the question."""
    tables: Sequence[Table]
    notes: Sequence[str | Note] = ()
    """Facts that a reader needs to understand the figures, a sentence or two each; a `Note` is for some records."""

    def notes_of(self, record: Record) -> list[str]:
        """The notes that apply to a record."""
        return [
            note.text if isinstance(note, Note) else note
            for note in self.notes
            if not isinstance(note, Note) or note.about(record)
        ]


MIB = 1 / (1 << 20)
YES_OR_NO = ("Yes", "Not by all goals")
"""Verdicts of an answer, by whether its record meets all its goals."""
TOKENS = Column(field="tokens_per_forward", title="tokens per forward")
UNRECORDED_WARM = Note(
    text="The seed of the quickstart that made the input was not recorded.",
    about=has_input("examples.arithmetic.quickstart", lacks="--seed"),
)


def percent(field: str, title: str) -> Column:
    """Column of a share, shown in percent."""
    return Column(field=field, title=f"{title}, %", scale=100.0)


def milliseconds(field: str, title: str) -> Column:
    """Column of seconds, shown in milliseconds."""
    return Column(field=field, title=f"{title}, ms", scale=1e3)


def spread(field: str, title: str, *, scale: float = 1.0) -> tuple[Column, Column, Column]:
    """Columns of the least, median and largest value over the rows of a line."""
    return (
        Column(field=field, title=f"{title}, least", scale=scale, reduce="least"),
        Column(field=field, title=f"{title}, median", scale=scale),
        Column(field=field, title=f"{title}, most", scale=scale, reduce="most"),
    )
