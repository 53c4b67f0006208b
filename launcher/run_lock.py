"""One living process per run directory.

The lock is the kernel's (`flock`), so it ends with its holder, however that ends: a stale LOCK file is simply taken
over. The file's text (process id, host) is for people and for the message of a refusal. Descriptors are closed on
exec, so that engines and workers started by a run do not keep its lock alive.
"""

import fcntl
import json
import os
import socket
from pathlib import Path

from launcher.errors import RunDirectoryError


class RunLock:
    """Holds the lock of `path` from construction to `release`."""

    def __init__(self, path: Path) -> None:
        """Takes the lock; raises `RunDirectoryError` naming the process that has it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 4096).decode(errors="replace")
            os.close(self._descriptor)
            raise RunDirectoryError(
                f"run_dir `{path.parent}` is in use by {_describe(holder)}; "
                "wait for it, end it, or give another run_dir"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    def release(self) -> None:
        """Gives the lock back; a second call does nothing. The file stays, so that a waiting opener locks the same."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing alone would wait for a child between fork and exec
            os.close(self._descriptor)
            self._descriptor = -1


def _describe(holder: str) -> str:
    try:
        fields = json.loads(holder)
    except ValueError:
        return "another process"
    return f"process {fields['pid']} on {fields['host']}"
