"""The `checkpoints/` folder of a run: checkpoints are written to a partial folder, renamed, then named by `latest`.

Older checkpoints are renamed, then removed by a thread, because a file system frees hundreds of GiB slowly.

Invariants: `latest` names a folder that was complete when it was renamed; a folder with the suffix `.partial` is
incomplete; older checkpoints are removed only after `latest` names a newer one. A removal has ended before the next
checkpoint begins, so no more than `keep_last` and a new one need room. A save that has failed keeps no room: its folder
goes with the next save, at the end of the run, or at the next start.
"""

import re
import shutil
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from launcher.errors import RunDirectoryError
from launcher.run_dir.atomic_files import replace_text, sync_folder, sync_tree

WRITER, WRITE = "checkpoint writer", "write"
"""Actor and activity of the span from the begin of a save to its last file."""

_UNFINISHED = re.compile(r"\d+(\.removed)?\.partial")
"""Names of checkpoints that are not whole, and of older ones whose removal has begun."""


class Checkpoints:
    """Checkpoints by step, under one folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._removal: threading.Thread | None = None
        self._before = self._named()
        """Text of `latest` at the start and after each save, whatever a person writes there meanwhile."""

    def begin(self, step: int) -> Path:
        """An empty partial folder for the checkpoint of `step`; what could not be removed before is removed now.

        Raises:
            OSError: an earlier partial folder cannot be removed, or no folder can be made.
        """
        self.wait_for_removal()
        for leftover in self._unfinished():
            shutil.rmtree(leftover)
        partial = self._path / f"{step}.partial"
        partial.mkdir()
        return partial

    def finish(self, step: int, keep_last: int) -> Path:
        """Makes the folder of `begin(step)` the newest checkpoint; a thread removes all but the newest `keep_last`.

        Checkpoints of later steps stay and do not count: their run returned by hand to a step before them. Those that
        it passes without a save of its own are the first to go.
        """
        before, self._before = self._before, str(step)
        passed = [each for each in self.steps() if before.isdecimal() and int(before) < each < step]
        partial, final = self._path / f"{step}.partial", self._path / str(step)
        sync_tree(partial)
        removed = [self._retire(step)] if final.exists() else []
        partial.rename(final)
        sync_folder(self._path)
        replace_text(self._path / "latest", f"{step}\n")
        own = [each for each in self.steps() if each <= step and each not in passed]
        removed += [self._retire(old) for old in [*passed, *own][:-keep_last]]
        self._removal = threading.Thread(target=_remove, args=(removed,), name="old checkpoints")
        self._removal.start()
        return final

    def wait_for_removal(self) -> None:
        """Wait until older checkpoints are removed; the program also does so before it ends."""
        if self._removal is not None:
            self._removal.join()

    def remove_unfinished(self) -> None:
        """Remove what no save will finish, after older checkpoints are removed; call it while nothing is saved."""
        self.wait_for_removal()
        _remove(self._unfinished())

    def _unfinished(self) -> list[Path]:
        return [each for each in self._path.glob("*.partial") if _UNFINISHED.fullmatch(each.name) and each.is_dir()]

    def _retire(self, step: int) -> Path:
        """Give a checkpoint a name by which nothing resumes from it."""
        return (self._path / str(step)).rename(self._path / f"{step}.removed.partial")

    def latest(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint; None if there is none.

        Raises:
            RunDirectoryError: `latest` holds no step, or names a checkpoint that is gone.
        """
        text = self._named()
        if not text:
            return next(((step, self._path / str(step)) for step in reversed(self.steps())), None)
        pointer = self._path / "latest"
        if not text.isdecimal():
            raise RunDirectoryError(f"{pointer} holds {text[:40]!r}, not a step; {self._choice()}")
        folder = self._path / str(int(text))
        if folder.is_dir():
            return int(text), folder
        if self._named() != text:  # the run has saved since, and removed that one
            return self.latest()
        raise RunDirectoryError(f"{pointer} names step {text}, but {folder} is missing; {self._choice()}")

    def instead_of(self, step: int) -> str:
        """Advice for a damaged checkpoint of `step`, as the end of an error.

        It names those of earlier steps. Without `latest` the last of all would be resumed, and a run that returned by
        hand leaves checkpoints of the course that it abandoned. Only their times tell them apart, so these are named.
        """
        earlier = [each for each in reversed(self.steps()) if each < step]
        if not earlier:
            return f"no checkpoint before it is left; to begin anew, remove {self._path}"
        if len(earlier) == 1:
            return (
                f"remove that folder and write {earlier[0]} into {self._path / 'latest'} to resume from the one before"
            )
        return (
            f"remove that folder and write the step to resume from into {self._path / 'latest'}: "
            f"{', '.join(map(self._with_time, earlier))}; a later step that was saved earlier is of a course that a "
            "return by hand abandoned"
        )

    def _with_time(self, step: int) -> str:
        """A step and when its checkpoint was saved, in local time."""
        saved_s = (self._path / str(step)).stat().st_mtime
        return f"{step} (saved {datetime.fromtimestamp(saved_s):%Y-%m-%d %H:%M})"

    def _choice(self) -> str:
        """What a person may write into `latest`, as the end of an error."""
        left = ", ".join(map(str, self.steps()))
        return (
            f"checkpoints that are left: {f'{left}; write one of them into that file' if left else 'none'}"
            f"; to begin anew, remove {self._path}"
        )

    def _named(self) -> str:
        """Text of `latest`; empty without that file."""
        pointer = self._path / "latest"
        return pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.exists() else ""

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return sorted(int(child.name) for child in self._path.iterdir() if child.name.isdecimal() and child.is_dir())


def _remove(folders: Sequence[Path]) -> None:
    """Remove folders. One that remains is removed when the next checkpoint begins, or raises there."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
