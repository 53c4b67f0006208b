"""Small files that survive `kill -9`: whole-file replacement, and line-by-line appending.

A reader of a replaced file sees the old text or the new text, never a part. In an appended file at most the last line
is incomplete; `drop_torn_line` removes it before the next append.
"""

import codecs
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic_core import from_json

from history.own_files import opener
from launcher.errors import RunDirectoryError


class Line(NamedTuple):
    """A line of a JSON-lines file that is not blank."""

    number: int
    """Counted from 1."""
    text: bytes
    row: dict[str, object] | None
    """None if the line is damaged: it holds no row."""


def replace_text(path: Path, text: str) -> None:
    """Replaces the content of `path` by `text`, atomically."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Makes the content of `path` durable; nothing if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Makes renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Makes every file below `path` durable, then the folders that name them; a rename must not precede the data."""
    folders = [path]
    for child in path.rglob("*"):
        if child.is_file():
            sync_file(child)
        elif child.is_dir():
            folders.append(child)
    for folder in folders:
        sync_folder(folder)


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Appends one JSON line in a single write."""
    with open(path, "a", encoding="utf-8", opener=opener) as file:
        file.write(json.dumps(row) + "\n")


def replace_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Replaces the content of `path` by `rows`, one JSON line each, atomically."""
    replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, object]]:
    """All rows of a JSON-lines file; none if it does not exist.

    Raises:
        RunDirectoryError: a line is damaged.
    """
    return list(iterate_rows(path))


def iterate_rows(path: Path) -> Iterator[dict[str, object]]:
    """The rows of a JSON-lines file, one after another; none if it does not exist.

    Raises:
        RunDirectoryError: a line is damaged; names the file, the line and what to do.
    """
    for line in iterate_lines(path):
        if line.row is None:
            raise RunDirectoryError(
                f"{path}, line {line.number}: holds no row, but {line.text[:40]!r}; remove that line "
                f"(`sed -i {line.number}d {path}`)"
            )
        yield line.row


def iterate_lines(path: Path) -> Iterator[Line]:
    """As `iterate_rows`, with damaged lines, for readers that leave them out and say so (`left_out`).

    A last line without newline is left out: a process is writing it. A reader can see part of a single write.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.endswith(b"\n") and text.strip():
                yield Line(number, text, _row(text.removeprefix(codecs.BOM_UTF8)))


def _row(text: bytes) -> dict[str, object] | None:
    try:
        row = from_json(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def readable_rows(path: Path) -> tuple[list[dict[str, object]], int]:
    """The rows of a JSON-lines file, and how many damaged lines are left out."""
    rows = [line.row for line in iterate_lines(path)]
    found = [row for row in rows if row is not None]
    return found, len(rows) - len(found)


def left_out(path: Path, count: int) -> list[str]:
    """A sentence about damaged lines that a reader has left out; empty without them."""
    return [f"{count} line(s) of {path.name} are damaged and left out"] if count else []


def drop_torn_line(path: Path) -> None:
    """Removes the bytes after the last newline, which a process left that was killed during a write."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
