"""Small files that survive `kill -9`: whole-file replacement, and line-by-line appending.

A reader of a replaced file sees the old text or the new text, never a part. In an appended file at most the last line
is incomplete; `drop_torn_line` removes it before the next append.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replaces the content of `path` by `text`, atomically."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
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


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Appends one JSON line in a single write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def replace_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Replaces the content of `path` by `rows`, one JSON line each, atomically."""
    replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, object]]:
    """All rows of a JSON-lines file; none if it does not exist.

    A last line without newline is left out: a process is writing it. A reader can see part of a single write.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


def drop_torn_line(path: Path) -> None:
    """Removes the bytes after the last newline, which a process left that was killed during a write."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
