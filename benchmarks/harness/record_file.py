"""A record as a file: JSON with one row per line, so a diff shows which rows changed.

`text` writes a record, `read` reads it. Every row names the commit at which it was measured (`commit`) and whether
tracked files had uncommitted changes (`dirty`: true, false, or null if not recorded).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast

Row = Mapping[str, str | int | float | bool]
Machine = Mapping[str, str | int | list[str]]
ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
"""Root of the checkout."""
RESULTS = ROOT / "benchmarks" / "results"
"""Folder of the committed records."""
_LISTS = ("inputs", "rows", "goals", "not_measured")
"""Fields whose items are written one per line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A measured value with the bound that it should meet."""

    name: str
    value: float
    bound: float
    direction: Literal["at least", "at most"]
    unit: str

    @property
    def met(self) -> bool:
        """Whether the value meets the bound."""
        return self.value >= self.bound if self.direction == "at least" else self.value <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file or folder that a benchmark read and that is not committed."""

    path: str
    command: str
    """Command of this repository that makes the input again; `UNRECORDED` if unknown."""


UNRECORDED = "not recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The code that a row was measured with."""

    commit: str
    """Hash of the commit; empty outside a checkout."""
    dirty: bool | None
    """Whether tracked files differed from the commit; None: not recorded."""

    @classmethod
    def of(cls, row: Mapping[str, object]) -> Self:
        """From a row of a record."""
        dirty = row.get("dirty")
        return cls(commit=str(row.get("commit", "")), dirty=dirty if isinstance(dirty, bool) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record that one command wrote."""

    name: str
    """Name of the file without its suffix."""
    command: str
    date: str
    """Day on which the record was written, as YYYY-MM-DD."""
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
        """The benchmark's module; empty if the command does not use `python -m`."""
        return self.command.partition(" -m ")[2].partition(" ")[0]

    @property
    def commits(self) -> dict[Provenance, int]:
        """Number of rows measured with each version of the code, in the order of the rows."""
        num_rows: dict[Provenance, int] = {}
        for row in self.rows:
            num_rows[Provenance.of(row)] = num_rows.get(Provenance.of(row), 0) + 1
        return num_rows


def text(fields: Mapping[str, object]) -> str:
    """A record's fields as JSON: one line per field, and one line per item of a list."""
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
    """Read a record. A KeyError names a missing field."""
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
    """All records of a folder, ordered by name."""
    return [read(path) for path in sorted(directory.glob("*.json"))]
