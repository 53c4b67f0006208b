"""The folder in a node's shared memory in which the reader publishes segments.

The folder's name carries the run and the run's process. The reader holds a file lock on the folder until the reader's
process ends. An unlocked folder is a leftover; the next reader on the node removes it.

This module imports no numba: a process that only holds the history service needs none.
"""

import fcntl
import os
import shutil
from pathlib import Path

from history.own_files import is_private_folder, make_private_folder

SHM = Path("/dev/shm")
_PREFIX = "mrl-history-"
_LOCK = "LOCK"


def segments_dir(run_id: str) -> str:
    """Name of the segments folder of this process's run; the same on each node."""
    return str(SHM / f"{_PREFIX}{run_id}-{os.getpid()}")


def claim(directory: Path) -> int:
    """Lock `directory` for this process and empty it. Return the lock's descriptor; closing it frees the folder.

    Raises:
        PlantedError: another user has made something of that name.
    """
    make_private_folder(directory)
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    for path in directory.iterdir():
        if path.name != _LOCK:
            path.unlink()
    return descriptor


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
