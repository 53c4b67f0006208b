"""Small files that survive `kill -9`: whole-file replacement, and line-by-line appending.

A reader sees the old text or the new one, never a half; of an appended file at most the last line is torn, and
`drop_torn_line` removes it before anybody appends again.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Atomically makes `text` the content of `path`."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


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
    """Atomically makes `rows`, one JSON line each, the content of `path`."""
    replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, object]]:
    """All rows of a JSON-lines file; none if it does not exist.

    A last line without its end is being written, even if by a single write: readers see it page by page.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


def drop_torn_line(path: Path) -> None:
    """Removes the bytes after the last newline, left by a process that was killed while it wrote."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
