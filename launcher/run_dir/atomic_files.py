"""Small files that survive `kill -9`: whole-file replacement, and line-by-line appending.

A reader of a replaced file sees the old text or the new text, never a part. In an appended file at most the last line
is incomplete; `drop_torn_line` removes it before the next append.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic_core import from_json

from history.own_files import opener


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
    """All rows of a JSON-lines file; none if it does not exist."""
    return list(iterate_rows(path))


def iterate_rows(path: Path) -> Iterator[dict[str, object]]:
    """The rows of a JSON-lines file, one after another; none if it does not exist.

    A last line without newline is left out: a process is writing it. A reader can see part of a single write.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and line != b"\n":
                yield from_json(line)


def drop_torn_line(path: Path) -> None:
    """Removes the bytes after the last newline, which a process left that was killed during a write."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
