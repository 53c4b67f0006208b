"""Facts of the kernel about a process of this machine: `/proc/PID/stat` (`proc(5)`).

The start of a process is read here and not from psutil, whose `create_time` is a wall clock time. It is computed anew
at each call and moves when somebody sets the clock, so two calls for one process may differ.
"""

from pathlib import Path

_START = 22 - 3
"""Place of field 22 among those of `stat_fields`."""


def stat_fields(pid: int) -> list[str]:
    """Fields of a process from the third on: those after its name, which may contain spaces and parentheses.

    Raises:
        FileNotFoundError, ProcessLookupError: the process has ended.
    """
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """Clock ticks (`SC_CLK_TCK` a second) from the boot of the machine to the start of a process; they never change.

    Raises:
        FileNotFoundError, ProcessLookupError: the process has ended.
    """
    return int(stat_fields(pid)[_START])
