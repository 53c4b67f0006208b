"""Writes the stacks of processes of this node into files, so that a hang can be understood after it was ended.

    LOGS/stacks/NODE/ROLE-RANK-TIME.txt

LOGS is the folder of the logs, NODE the host name, ROLE-RANK the name of the process's log. The file has a section for
the process and one for each of its children (vLLM's core and workers, writers of a checkpoint). A section has:

* the state of the process, and what each of its threads waits for in the kernel;
* stacks by faulthandler, if the process called `write_stacks_on_signal`: it writes them to its log, from where they are
  copied. A frozen process writes none, a process that holds the interpreter's lock does;
* stacks by py-spy (`py-spy dump`) where that is installed and may read the process. It reads frozen processes, too.
"""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from history.own_files import opener
from rollout.processes import STACKS_SIGNAL, ProcessId, family

_QUIET_S, _LONGEST_S = 0.2, 1.0
"""A log that does not grow for so long is complete; time in which a process writes its stacks."""
_PY_SPY_S = 10.0
_MOST_BYTES = 1 << 20
"""Most bytes of a log that are copied."""


def write_stacks(processes: Sequence[ProcessId], when: str) -> tuple[str, ...]:
    """Write the stacks of processes of this node, and of their children; returns the files.

    `when` becomes the last part of their names. A process without a log gets no file; its stacks are where its standard
    error goes.

    Raises:
        PlantedError: a planted link has the name of a file. The stacks of other processes are written.
    """
    with ThreadPoolExecutor(max_workers=max(len(processes), 1)) as threads:
        writing = [threads.submit(_write_family, process, when) for process in processes]
    files = [each.result() for each in writing]  # after all have ended, so the error of one keeps none away
    return tuple(str(file) for file in files if file is not None)


def _write_family(process: ProcessId, when: str) -> Path | None:
    members = family(process)
    file = process.stacks_file(when)
    if not members or file is None:
        for member in members:
            _by_faulthandler(member)
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", encoding="utf-8", errors="replace", opener=opener) as out:
        for member in members:  # one after the other, because they may share a log
            try:
                sections = _head(member), _by_faulthandler(member), _by_py_spy(member)
            except (psutil.Error, OSError):  # it has ended meanwhile
                continue
            out.write("\n".join(sections) + "\n\n")
            out.flush()
    return file


def _head(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())[:200]
    lines = [f"=== process {process.pid}, {process.status()}: {title}"]
    for thread in sorted(Path(f"/proc/{process.pid}/task").iterdir(), key=lambda path: int(path.name)):
        with suppress(OSError):
            name, waits = ((thread / part).read_text(encoding="utf-8").strip() for part in ("comm", "wchan"))
            lines.append(f"thread {thread.name} ({name}) waits in the kernel for: {waits.strip('0') or 'nothing'}")
    return "\n".join(lines)


def _by_faulthandler(process: psutil.Process) -> str:
    """What a process writes to its standard error after the signal."""
    if not catches(process, STACKS_SIGNAL):
        return "--- faulthandler: not installed in this process"
    try:
        with Path(f"/proc/{process.pid}/fd/2").open("rb") as log:
            is_file = stat.S_ISREG(os.fstat(log.fileno()).st_mode)
            end = log.seek(0, os.SEEK_END) if is_file else 0
            process.send_signal(STACKS_SIGNAL)
            if not is_file:
                return "--- faulthandler: the process writes to no file"
            _await_growth(log.fileno(), end)
            log.seek(end)
            written = log.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        return f"--- faulthandler: the log of the process cannot be read: {error}"
    return f"--- faulthandler:\n{written or 'nothing was written; the process is frozen or ends'}"


def _await_growth(log: int, before: int) -> None:
    """Wait until a file has grown and grows no more."""
    size, quiet_since, deadline = before, time.monotonic(), time.monotonic() + _LONGEST_S
    while (now := time.monotonic()) < deadline:
        if (new := os.fstat(log).st_size) != size:
            size, quiet_since = new, now
        if size != before and now - quiet_since >= _QUIET_S:
            return
        time.sleep(0.02)


def catches(process: psutil.Process, number: int) -> bool:
    """Whether a process has a handler for a signal, which would otherwise end it."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    caught = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(caught and caught[0] >> (number - 1) & 1)


def py_spy() -> str | None:
    """Path of py-spy: on PATH, or beside the interpreter."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _by_py_spy(process: psutil.Process) -> str:
    program = py_spy()
    if program is None:
        return "--- py-spy: not installed"
    # a process that the kernel does not let run cannot be paused, and does not move
    frozen = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP)
    line = [program, "dump", "--pid", str(process.pid), *(["--nonblocking"] if frozen else [])]
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"--- py-spy: {error}"
    return f"--- py-spy:\n{done.stdout if done.returncode == 0 else done.stderr.strip()}"
