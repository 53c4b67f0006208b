"""Memory that control groups leave to this process, as SLURM and containers set them; versions 1 and 2.

And the processes of this process's group that the kernel has ended for lack of memory.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_CACHED = ("inactive_file", "active_file")
"""Of `memory.stat`: pages of files, which the kernel frees before it refuses memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Names of the files of a version; `prefix` goes before sums over all groups below."""

    limit: str
    used: str
    prefix: str
    kills: str
    """Counter of kills; that of version 2 has those of all groups below as well."""


_V1 = _Files(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", prefix="total_", kills="memory.oom_control")
_V2 = _Files(limit="memory.max", used="memory.current", prefix="", kills="memory.events")
_OF_ALL = "release_agent"
"""In the group of all processes of a machine, in version 1 only; in version 2 this group counts no kills."""
_JOB = re.compile(r"job_\d+")
"""SLURM's group of a job. Each step of the job has one below it, and Ray runs in another step than the controller."""


def memory_limit_left(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes below the nearest memory limit of this process's control group and of those around it.

    SLURM limits the group of the job, which is above that of the process. A container that does not see the groups
    above finds its own at the root. Pages of files count as free, as in the memory that a machine has available.

    Args:
        own: lists the groups of the process, `ID:CONTROLLERS:PATH` a line; version 2 has no controllers there.
        root: where the groups are mounted; version 1 has a folder for each controller.

    Returns:
        `sys.maxsize` without a limit.
    """
    left = sys.maxsize
    for top, path, files in _memory_groups(own, root):
        for group in [top / path, *[top / parent for parent in path.parents]]:
            with contextlib.suppress(OSError, ValueError):  # "max" is no number, and a root has no limit
                left = min(left, _left(group, files))
    return left


def memory_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes that the out-of-memory killer has ended in this process's control group, or in its SLURM job.

    The machine's counter is not read: it counts the processes of other users and jobs, too. Arguments are those of
    `memory_limit_left`.

    Returns:
        The number since the group was made; 0 if nobody counts them.
    """
    for top, path, files in _memory_groups(own, root):
        for group in (top / _of_job(path), top):
            if (group / files.kills).exists() and not (group / _OF_ALL).exists():
                # `os.walk` passes by a group that ends meanwhile
                groups = (folder for folder, *_ in os.walk(group)) if files is _V1 else [group]
                return sum(_kills(Path(each) / files.kills) for each in groups)
    return 0


def _kills(counters: Path) -> int:
    with contextlib.suppress(OSError):  # a step of the job has ended meanwhile
        return _numbers(counters).get("oom_kill", 0)
    return 0


def _of_job(path: Path) -> Path:
    """The group of the SLURM job in a group's path; the path itself outside a job."""
    return next((group for group in path.parents if _JOB.fullmatch(group.name)), path)


def _left(group: Path, files: _Files) -> int:
    limit = int((group / files.limit).read_text(encoding="utf-8"))
    used = int((group / files.used).read_text(encoding="utf-8"))
    stat = _numbers(group / "memory.stat")
    cached = sum(stat.get(f"{files.prefix}{name}", 0) for name in _CACHED)
    return max(0, limit - max(0, used - cached))


def _numbers(path: Path) -> Mapping[str, int]:
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2}


def _memory_groups(own: Path, root: Path) -> Iterator[tuple[Path, Path, _Files]]:
    """Mount of each version that this process has a group of, and the group's path below it."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        below = Path(path.lstrip("/"))
        if not controllers:
            yield root, below, _V2
        elif "memory" in controllers.split(","):
            yield root / "memory", below, _V1
