"""The folder of a node's shared memory in which its reader publishes segments.

Its name carries the run and the process that the run belongs to. The reader holds a lock of the kernel
on it, which ends with the reader however that ends: a folder that nobody has locked is a leftover, and
the next reader on that node removes it.
"""

import fcntl
import os
import shutil
from pathlib import Path

SHM = Path("/dev/shm")
_PREFIX = "mrl-history-"
_LOCK = "LOCK"


def segments_dir(run_id: str) -> str:
    """The folder of a run that this process owns; the same on each node."""
    return str(SHM / f"{_PREFIX}{run_id}-{os.getpid()}")


def claim(directory: Path) -> int:
    """Make `directory` empty and this process's, and return the descriptor of its lock, to be kept open."""
    directory.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    for path in directory.iterdir():
        if path.name != _LOCK:
            path.unlink()
    return descriptor


def sweep_segments() -> list[Path]:
    """Remove the folders on this node whose reader is gone; returns them."""
    return sorted(path for path in SHM.glob(f"{_PREFIX}*") if path.is_dir() and _remove_if_free(path))


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
