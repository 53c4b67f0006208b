"""Processes that a reward function has started: who they are, what they use, and their end. Linux only.

A process that calls `adopt_orphans` becomes the parent of its descendants whose own parents ended. So none of them
leaves the tree, also not a daemon with a session of its own.
"""

import ctypes
import os
import signal
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from history.process_stat import stat_fields

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_MAX_ROUNDS = 100
"""Rounds of `end_children`; processes that start others faster than they are killed end with their group."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; ends it now if that has happened."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def go_on_after_parent() -> None:
    """Let the kernel continue this process when its parent ends, should it be stopped then."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def children(pid: int) -> list[int]:
    """Process ids of the children of a process; none if it has ended."""
    try:
        found: list[int] = []
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    except ProcessLookupError:
        return []
    except FileNotFoundError:  # the process or a thread has ended, or the kernel does not list children
        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(pid).children()]
        return []
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of children, their children and so on."""
    found: list[int] = []
    parents = [pid]
    while parents:
        parents = [child for parent in parents for child in children(parent)]
        found += parents
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds of these processes and of the ended children that they have waited for."""
    return sum(map(_cpu_ticks, pids)) / _TICKS


def _cpu_ticks(pid: int) -> int:
    try:
        return sum(map(int, stat_fields(pid)[11:15]))  # utime, stime, cutime and cstime: the fields 14 to 17
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; not if it has ended."""
    try:
        return stat_fields(pid)[0] in ("T", "t")
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_children() -> int:
    """Kill the children of this process and theirs; returns how many were alive.

    This process adopts orphans, so the children of a killed child become its own.
    """
    num_alive = 0
    for _ in range(_MAX_ROUNDS):
        found = children(os.getpid())
        if not found:
            break
        for pid in found:
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    num_alive += 1
                    kill(pid)
                    os.waitpid(pid, 0)
    return num_alive


def kill_others(kept: Collection[int]) -> None:
    """Kill the children of this process that are not `kept`, and do not wait for them."""
    for pid in children(os.getpid()):
        if pid not in kept:
            kill(pid)


def kill(pid: int) -> None:
    """Kill a process, if it has not ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill a process and all processes of its group at once: none of them can start another one meanwhile."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a process that does not react, and all below it. It is stopped first, so that it frees no process id."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for child in children(pid):
        kill_group(child)
    for below in descendants(pid):
        kill(below)
    kill(pid)
