"""A record as a file: JSON with one row a line, so that a diff shows which rows changed.

`text` writes it, `read` reads it. Every row names the commit that it was measured at (`commit`) and whether tracked
files had changes then (`dirty`: true, false, or null where nobody recorded it).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast

Row = Mapping[str, str | int | float | bool]
Machine = Mapping[str, str | int | list[str]]
ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
"""Of the checkout."""
RESULTS = ROOT / "benchmarks" / "results"
"""Where committed records lie."""
_LISTS = ("inputs", "rows", "goals", "not_measured")
"""Fields whose items have a line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure that was to be reached, with the value that was."""

    name: str
    value: float
    bound: float
    direction: Literal["at least", "at most"]
    unit: str

    @property
    def met(self) -> bool:
        """Whether the value lies on the right side of the bound."""
        return self.value >= self.bound if self.direction == "at least" else self.value <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file or folder that a benchmark read and that is not committed."""

    path: str
    command: str
    """Of this repository, which makes it again; `UNRECORDED` where it is not known."""


UNRECORDED = "not recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The code that a row was measured with."""

    commit: str
    """Empty outside a checkout."""
    dirty: bool | None
    """Whether tracked files differed from the commit; None: not recorded."""

    @classmethod
    def of(cls, row: Mapping[str, object]) -> Self:
        """As a row of a record states it."""
        dirty = row.get("dirty")
        return cls(commit=str(row.get("commit", "")), dirty=dirty if isinstance(dirty, bool) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one command measured."""

    name: str
    """Of its file, without the suffix."""
    command: str
    date: str
    """Day on which it was written, year first."""
    inputs: tuple[Input, ...]
    versions: Mapping[str, str]
    machine: Machine
    stolen_share: float | None
    """Share of CPU time that the host gave to others; None: not recorded."""
    rows: tuple[Row, ...]
    goals: tuple[Goal, ...]
    not_measured: tuple[str, ...]

    @property
    def module(self) -> str:
        """The benchmark's module, empty if the command is none of `python -m`."""
        return self.command.partition(" -m ")[2].partition(" ")[0]

    @property
    def commits(self) -> dict[Provenance, int]:
        """Number of rows by the code that they were measured with, in the order of the rows."""
        found: dict[Provenance, int] = {}
        for row in self.rows:
            found[Provenance.of(row)] = found.get(Provenance.of(row), 0) + 1
        return found


def text(fields: Mapping[str, object]) -> str:
    """A record's fields as JSON: a line for each field, and within lists of rows a line for each item."""
    parts = []
    for name, value in fields.items():
        if name in _LISTS and isinstance(value, Sequence) and value:
            items = ",\n".join(f"  {json.dumps(item)}" for item in value)
            parts.append(f" {json.dumps(name)}: [\n{items}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_rows(path: Path) -> list[Row]:
    """The rows of a record."""
    return cast(list[Row], json.loads(path.read_text(encoding="utf-8"))["rows"])


def read(path: Path) -> Record:
    """A record. KeyError names the field that it lacks."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Record(
        name=path.stem,
        command=fields["command"],
        date=fields["date"],
        inputs=tuple(Input(**item) for item in fields["inputs"]),
        versions=fields["versions"],
        machine=fields["machine"],
        stolen_share=fields.get("cpu_share_taken_by_others"),
        rows=tuple(fields["rows"]),
        goals=tuple(Goal(**{name: value for name, value in item.items() if name != "met"}) for item in fields["goals"]),
        not_measured=tuple(fields["not_measured"]),
    )


def read_all(directory: Path = RESULTS) -> list[Record]:
    """All records of a folder, by name."""
    return [read(path) for path in sorted(directory.glob("*.json"))]
