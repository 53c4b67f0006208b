"""The folder `policy/` of a run: its last weights as a Hugging Face directory, and a mark that names their step.

The mark is written before the folder gets its name. So a folder with a mark is whole. One without a mark is of an
earlier version, or of an earlier course of the run. The earlier folder is moved aside before the new one gets the name,
and removed last. A replacement that was killed between the two is finished by the next one. One that fails removes what
it has written, so that it does not fill the disk; `remove_unfinished_export` does so for one that was killed.
"""

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from launcher.run_dir.atomic_files import replace_text, sync_folder, sync_tree

POLICY = "policy"
"""Folder of the run directory."""
MARK = ".exported_step"
"""File of an exported directory. Its name has no suffix, so that an export of a model made from it does not copy it."""


def exported_step(directory: Path) -> int | None:
    """Finished steps of the weights in an exported directory; None if they are unknown or the directory is missing."""
    try:
        step = json.loads((directory / MARK).read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def mark(directory: Path, step: int) -> None:
    """Note that an exported directory holds the weights after `step` finished steps."""
    replace_text(directory / MARK, json.dumps({"step": step}) + "\n")


def replace_policy(run_dir: Path, step: int, export: Callable[[str], None]) -> None:
    """Let `export` write the weights after `step` steps into a partial folder, which then replaces `policy/`.

    Raises:
        OSError: a file could not be written; errors of `export` pass, too. The earlier folder stays then.
    """

    def write(partial: Path) -> None:
        export(str(partial))
        mark(partial, step)

    policy = _policy(run_dir)
    replace_folder(policy, _partial_of(policy), write)


def replace_folder(target: Path, partial: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make the folder `partial` beside `target`, which it then replaces.

    An interruption leaves `target` whole. A process that is killed between the two renames leaves it missing; the next
    call finishes that replacement first.

    Raises:
        OSError: a file could not be written, or a folder that an earlier call has moved aside cannot be removed; errors
            of `write` pass, too. The earlier folder stays then, and `partial` is removed.
    """
    _finish_killed(target, partial)
    if _aside(partial).exists():
        raise FileExistsError(errno.EEXIST, "left of an earlier replacement: remove it", str(_aside(partial)))
    _remove_parts(partial)
    with ExitStack() as on_failure:
        on_failure.callback(_remove_parts, partial)
        write(partial)
        sync_tree(partial)
        on_failure.pop_all()
    try:
        if target.exists():
            target.rename(_aside(partial))
    finally:
        _take_place(target, partial)


def remove_unfinished_export(run_dir: Path) -> None:
    """Finish or remove a replacement of `policy/` that was killed or could not be removed when it failed.

    Call it while the run exports nothing. Where `policy` is a link, nothing is done: what lies beside the folder that
    it leads to may be another run's.

    Raises:
        OSError: a replacement that was killed between its renames cannot be finished; nothing of it is removed.
    """
    policy = run_dir / POLICY
    if policy.is_symlink():
        return
    _finish_killed(policy, _partial_of(policy))
    _remove_parts(_partial_of(policy))


def _remove_parts(partial: Path) -> None:
    """Remove a partial folder, and the one in which an export writes what it then renames to `partial`."""
    for folder in (partial, _partial_of(partial)):
        shutil.rmtree(folder, ignore_errors=True)


def _aside(partial: Path) -> Path:
    """Name of the earlier folder while the new one takes its place; no `partial` of another target has it."""
    return partial.with_name(f".earlier.{partial.name}")


def _finish_killed(target: Path, partial: Path) -> None:
    """Finish a replacement whose process was killed behind its first rename: `partial` was whole by then."""
    earlier = _aside(partial)
    if earlier.exists() and partial.exists():
        _take_place(target, partial)
    else:
        shutil.rmtree(earlier, ignore_errors=True)


def _take_place(target: Path, partial: Path) -> None:
    """Give `partial` the name of `target`, or the earlier folder if that fails; then remove the earlier folder."""
    earlier = _aside(partial)
    if not target.exists():
        try:
            partial.rename(target)
        except OSError:
            if earlier.exists():
                earlier.rename(target)
            raise
    sync_folder(target.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def forget_policy(run_dir: Path, first_step: int) -> None:
    """The run takes all steps from `first_step` on again: weights of later ones are no longer its own, but stay."""
    policy = _policy(run_dir)
    _finish_killed(policy, _partial_of(policy))
    step = exported_step(policy)
    if step is not None and step > first_step:
        _unmark(policy)


def _policy(run_dir: Path) -> Path:
    """The folder itself where `policy` is a link to it."""
    return (run_dir / POLICY).resolve()


def _partial_of(target: Path) -> Path:
    """Name of the folder that replaces `target`; `megatron_rl.weights.hf_export` gives its own the same suffix."""
    return target.with_name(f"{target.name}.partial")


def _unmark(directory: Path) -> None:
    if directory.is_dir():
        (directory / MARK).unlink(missing_ok=True)
        sync_folder(directory)
