"""The `checkpoints/` folder of a run: checkpoints are written to a partial folder, renamed, then named by `latest`.

Older checkpoints are renamed, then removed by a thread, because a file system frees hundreds of GiB slowly.

Invariants: `latest` names a folder that was complete when it was renamed; a folder with the suffix `.partial` is
incomplete; older checkpoints are removed only after `latest` names a newer one. A removal has ended before the next
checkpoint begins, so no more than `keep_last` and a new one need room.
"""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import RunDirectoryError
from launcher.run_dir.atomic_files import replace_text, sync_file, sync_folder

WRITER, WRITE = "checkpoint writer", "write"
"""Actor and activity of the span from the begin of a save to its last file."""


class Checkpoints:
    """Checkpoints by step, under one folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._removal: threading.Thread | None = None

    def begin(self, step: int) -> Path:
        """An empty partial folder for the checkpoint of `step`; what could not be removed before is removed now."""
        self.wait_for_removal()
        for leftover in self._path.glob("*.partial"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
        partial = self._path / f"{step}.partial"
        partial.mkdir()
        return partial

    def finish(self, step: int, keep_last: int) -> Path:
        """Makes the folder of `begin(step)` the newest checkpoint; a thread removes all but the newest `keep_last`."""
        partial, final = self._path / f"{step}.partial", self._path / str(step)
        _sync_tree(partial)
        removed = [self._retire(step)] if final.exists() else []
        partial.rename(final)
        sync_folder(self._path)
        replace_text(self._path / "latest", f"{step}\n")
        removed += [self._retire(old) for old in self.steps()[:-keep_last] if old != step]
        self._removal = threading.Thread(target=_remove, args=(removed,), name="old checkpoints")
        self._removal.start()
        return final

    def wait_for_removal(self) -> None:
        """Wait until older checkpoints are removed; the program also does so before it ends."""
        if self._removal is not None:
            self._removal.join()

    def _retire(self, step: int) -> Path:
        """Give a checkpoint a name by which nothing resumes from it."""
        return (self._path / str(step)).rename(self._path / f"{step}.removed.partial")

    def latest(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint; None if there is none."""
        pointer = self._path / "latest"
        text = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.exists() else ""
        if text and not text.isdecimal():
            raise RunDirectoryError(
                f"{pointer} holds {text[:40]!r}, not a step; remove the file to resume the newest checkpoint"
            )
        named = [int(text)] if text else []
        existing = [step for step in (named or self.steps()[-1:]) if (self._path / str(step)).is_dir()]
        return (existing[0], self._path / str(existing[0])) if existing else None

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return sorted(int(child.name) for child in self._path.iterdir() if child.name.isdecimal())


def _remove(folders: Sequence[Path]) -> None:
    """A folder that remains is removed when the next checkpoint begins, or raises there."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _sync_tree(path: Path) -> None:
    """Flushes every file below `path` to disk, then the folders that name them; a rename must not precede the data."""
    folders = [path]
    for child in path.rglob("*"):
        if child.is_file():
            sync_file(child)
        elif child.is_dir():
            folders.append(child)
    for folder in folders:
        sync_folder(folder)
