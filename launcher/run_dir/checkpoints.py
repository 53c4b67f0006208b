"""The `checkpoints/` folder of a run: checkpoints are written to a partial folder, renamed, then named by `latest`.

Invariants: `latest` names a folder that was complete when it was renamed; a folder with the suffix `.partial` is
incomplete; older checkpoints are removed only after `latest` names a newer one.
"""

import shutil
from pathlib import Path

from launcher.errors import RunDirectoryError
from launcher.run_dir.atomic_files import replace_text, sync_file, sync_folder

WRITER, WRITE = "checkpoint writer", "write"
"""Actor and activity of the span from the begin of a save to its last file."""


class Checkpoints:
    """Checkpoints by step, under one folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, step: int) -> Path:
        """An empty partial folder for the checkpoint of `step`."""
        for leftover in self._path.glob("*.partial"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
        partial = self._path / f"{step}.partial"
        partial.mkdir()
        return partial

    def finish(self, step: int, keep_last: int) -> Path:
        """Makes the folder of `begin(step)` the newest checkpoint and removes all but the newest `keep_last`."""
        partial, final = self._path / f"{step}.partial", self._path / str(step)
        _sync_tree(partial)
        replaced = self._path / f"{step}.replaced.partial"
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        sync_folder(self._path)
        replace_text(self._path / "latest", f"{step}\n")
        for old in self.steps()[:-keep_last]:
            if old != step:
                shutil.rmtree(self._path / str(old))
        shutil.rmtree(replaced, ignore_errors=True)
        return final

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


def _sync_tree(path: Path) -> None:
    """Flushes every file below `path` to disk; a rename must not precede the data."""
    for child in path.rglob("*"):
        if child.is_file():
            sync_file(child)
