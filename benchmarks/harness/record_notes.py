"""Notes of a record's page that only some records of a view need: each names the rows, goals or inputs it speaks of.

A view describes the benchmark of today, and its record may be older. A note with a selector is shown only if the
record has what the note speaks of, so a page claims nothing that its rows lack.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.record_commands import of_today
from benchmarks.harness.record_file import Record
from benchmarks.harness.record_tables import Value

Selector = Callable[[Record], bool]
OLDER_GOALS = "The goals are of an older version of the benchmark."
"""What the page says of a record whose goals differ from those that today's benchmark would compute from its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A fact that a reader of some records needs."""

    text: str
    about: Selector
    """Whether a record has what the text speaks of."""


def has_rows(
    where: Mapping[str, Sequence[Value]] | None = None, *, fields: Sequence[str] = (), lacks: Sequence[str] = ()
) -> Selector:
    """Selects records with a row that has a value of `where` in each field, all `fields` and none of `lacks`."""
    allowed = where or {}

    def about(record: Record) -> bool:
        return any(
            all(row.get(name) in values for name, values in allowed.items())
            and all(name in row for name in fields)
            and not any(name in row for name in lacks)
            for row in record.rows
        )

    return about


def has_goals(*parts: str) -> Selector:
    """Selects records with a goal whose name contains one of the texts."""
    return lambda record: any(part in goal.name for goal in record.goals for part in parts)


def has_input(module: str, *, lacks: str) -> Selector:
    """Selects records with an input of a command that runs `module`, by its name of today, without an option."""

    def about(record: Record) -> bool:
        commands = [of_today(given.command).split() for given in record.inputs]
        return any(module in command and lacks not in command for command in commands)

    return about


def has_no_goals(*parts: str) -> Selector:
    """Selects records without a goal whose name contains one of the texts."""
    found = has_goals(*parts)
    return lambda record: not found(record)


def all_of(*selectors: Selector) -> Selector:
    """Selects records that all selectors select."""
    return lambda record: all(selector(record) for selector in selectors)


def older_goals(difference: str, *names: str) -> Note:
    """The note of a record with a goal of one of these names, which today's benchmark does not write."""
    return Note(
        text=f"{OLDER_GOALS} {difference}", about=lambda record: any(goal.name in names for goal in record.goals)
    )
