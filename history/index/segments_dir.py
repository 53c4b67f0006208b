"""The folder in a node's shared memory in which the reader publishes segments.

The folder's name carries the run, the run's process, and the node: two nodes of Ray may share a host and its memory.
The reader holds a file lock on the folder until the reader's process ends. An unlocked folder is a leftover; the next
reader on the node removes it.

This module imports no numba: a process that only holds the history service needs none.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from history.own_files import is_private_folder, make_private_folder

SHM = Path("/dev/shm")
_PREFIX = "mrl-history-"
_LOCK = "LOCK"


def segments_dir(run_id: str) -> str:
    """Name of the segments folders of this process's run, to which each node adds its own (`folder_of_node`)."""
    return str(SHM / f"{_PREFIX}{run_id}-{os.getpid()}")


def claim(directory: Path) -> int:
    """Lock `directory` for this process and empty it. Return the lock's descriptor; closing it frees the folder.

    Waits for the end of the process that has it, which is an earlier reader of the same node.

    Raises:
        PlantedError: another user has made something of that name.
    """
    while (descriptor := _lock(directory)) is None:
        pass
    for path in directory.iterdir():
        if path.name != _LOCK:
            path.unlink()
    return descriptor


def _lock(directory: Path) -> int | None:
    """The descriptor of the lock; None if somebody swept the folder meanwhile."""
    make_private_folder(directory)
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if is_claimed(directory, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def is_claimed(directory: Path, descriptor: int) -> bool:
    """Whether a lock of `claim` still locks `directory`, and nobody has removed the folder since."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), (directory / _LOCK).stat())
    return False


def sweep_segments() -> list[Path]:
    """Remove the segments folders on this node whose reader has ended; return their paths."""
    return sorted(path for path in SHM.glob(f"{_PREFIX}*") if is_private_folder(path) and _remove_if_free(path))


def _remove_if_free(directory: Path) -> bool:
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
