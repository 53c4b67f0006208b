"""The lock of a run directory: one process at a time, also on several nodes.

`RunLock` is a lock of the kernel (`flock`), which ends with its process, so a stale LOCK file does not block a start.
The file's text (process id, host) is for the message of a refusal; an orderly end empties it. Descriptors are closed on
exec, so that engines and workers of a run do not hold its lock.

On some mounts a lock holds on one node only. Where the text names another host, signs of life in `status.json` decide.
"""

import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from history.own_files import opener
from history.patience import AwakeClock
from launcher.errors import RunDirectoryError, RunInUseError
from launcher.run_dir.status import ALIVE_EVERY_S, read_now

_log = logging.getLogger(__name__)

YOUNG_S = 3 * ALIVE_EVERY_S
"""A holder on another node whose last sign is older has ended."""
WATCH_S = 2 * ALIVE_EVERY_S
"""For which a start waits for a new sign: network file systems show one late."""
_LOOK_S = 1.0
_OF_ONE_NODE = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay")
_OF_ALL_NODES = ("gpfs", "ceph")
_NFS = ("nfs", "nfs4")
_ONLY_HERE = {"nolock", "local_lock=flock", "local_lock=all"}


class RunLock:
    """Holds the lock of `path` from construction to `release`."""

    def __init__(self, path: Path) -> None:
        """Acquires the lock.

        Waits for `WATCH_S` at most if a process of another node has left its name within `YOUNG_S`, and the file system
        is not known to have locks that hold on all nodes.

        Raises:
            RunInUseError: another process has it (named), or lives on another node whose locks are not seen here.
            RunDirectoryError: the file system has no locks.
        """
        self._descriptor = opener(str(path), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 4096).decode(errors="replace")
            os.close(self._descriptor)
            raise RunInUseError(
                f"run_dir `{path.parent}` is in use by {_describe(holder)}; "
                "wait for it, end it, or give another run_dir"
            ) from None
        except OSError as error:  # as on a Lustre that was mounted without them
            os.close(self._descriptor)
            raise RunDirectoryError(
                f"run_dir `{path.parent}`: its file system has no locks (flock: {error.strerror}), so two runs could "
                "write there at once; mount it with them (Lustre: `-o flock`), or give a run_dir elsewhere"
            ) from error
        try:
            _refuse_other_node(path, os.pread(self._descriptor, 4096, 0).decode(errors="replace"))
        except RunInUseError:
            self._unlock()  # the text stays that of the holder
            raise
        os.ftruncate(self._descriptor, 0)
        with suppress(OSError):  # a full disk has no room for the text; the lock holds without it
            os.write(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    @property
    def is_held(self) -> bool:
        """Whether `release` has not been called."""
        return self._descriptor >= 0

    def release(self) -> None:
        """Releases the lock; a second call does nothing. The file stays, so that every opener locks the same file."""
        if self.is_held:
            os.ftruncate(self._descriptor, 0)
            self._unlock()

    def _unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough while a child is between fork and exec
        os.close(self._descriptor)
        self._descriptor = -1


def _refuse_other_node(lock: Path, holder: str) -> None:
    """Refuse a run directory in which a process of another node lives, although its lock is free here.

    A process that was killed leaves its name, too, but its `status.json` changes no more. Where locks are known to hold
    on all nodes, a free one is enough, so a requeued job does not wait.
    """
    run_dir, host = lock.parent, _fields(holder).get("host", socket.gethostname())
    if host == socket.gethostname() or locks_reach_all_nodes(run_dir):
        return
    sign_s = _sign_s(run_dir)
    if time.time() - max(sign_s, lock.stat().st_mtime) > YOUNG_S:
        return
    _log.warning("%s names %s, which may still live: waits %.0f s for its signs", lock, _describe(holder), WATCH_S)
    clock = AwakeClock()
    while clock() < WATCH_S:
        time.sleep(_LOOK_S)
        if _sign_s(run_dir) > sign_s:
            raise RunInUseError(
                f"run_dir `{run_dir}` is in use by {_describe(holder)}: its lock is free here, but its status.json "
                "changes. Locks of this file system hold on one node only; mount it with locks for all nodes (NFS: "
                "without `nolock` and `local_lock`; Lustre: `-o flock`, not `-o localflock`), and wait for that run, "
                "end it, or give another run_dir"
            )


def _sign_s(run_dir: Path) -> float:
    """Last sign of life of a run that goes on, wall clock; 0 where there is none."""
    try:
        now = read_now(run_dir)
    except (RunDirectoryError, OSError):  # the run that has the lock replaces it
        return 0.0
    return 0.0 if now is None or now.phase == "ended" else now.last_sign_s


def _fields(holder: str) -> dict[str, object]:
    """`pid` and `host` in the text of a lock; empty if it names no process."""
    try:
        fields = json.loads(holder)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) and {"pid", "host"} <= fields.keys() else {}


def _describe(holder: str) -> str:
    fields = _fields(holder)
    return f"process {fields['pid']} on {fields['host']}" if fields else "another process"


def locks_reach_all_nodes(path: Path) -> bool:
    """Whether every process that can open `path` sees its locks; False if the kind of file system does not tell."""
    place = path.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if place.is_relative_to(each.mountpoint)]
    if not mounts:
        return False
    # the longest path is nearest; of several mounts at one path the last one is seen
    _, mount = max(enumerate(mounts), key=lambda each: (len(each[1].mountpoint), each[0]))
    options = set(mount.opts.split(","))
    if mount.fstype in _NFS:
        return not options & _ONLY_HERE
    if mount.fstype == "lustre":
        return "flock" in options
    return mount.fstype in (*_OF_ONE_NODE, *_OF_ALL_NODES)
