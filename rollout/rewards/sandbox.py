"""Runs programs that a model has written, isolated by bubblewrap: no network, no files, no other processes.

A program sees an empty `/tmp`, the interpreter and the system's libraries (read-only), and itself. It has limits for
CPU time, memory, processes, file size, output and wall time. When it ends, or at its time limit, all its processes end
with it: they live in a process namespace of their own, which dies with its first process. The kernel limits the CPU
time of each process. That of all together is counted four times a second, so a program may exceed it for a moment.

As an ordinary user, a user namespace gives these rights. As root, bubblewrap runs without one, and the program gets a
user id that no other process has, because the kernel exempts root from the limit on processes.

bubblewrap is a program of its own (the package `bubblewrap` of Debian, Ubuntu and Fedora). Nothing is run without it.
"""

import json
import math
import os
import platform
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import IO

from history.patience import AwakeClock
from rollout.rewards.process_tree import cpu_seconds, descendants, kill

STACK_BYTES = 8 << 20
"""Stack of each thread, whatever the limit of this process. It counts towards `Limits.memory_bytes`."""
FIRST_USER_ID = 2_000_000
"""User ids of programs that root runs: above those of people and of containers' usual ranges."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_LOOK_EVERY_S = AwakeClock.READ_EVERY_S
"""Interval in which the CPU seconds of all processes of a program are counted."""

_SELF_TEST = """
import threading
try:
    threading.Thread(target=print, args=("thread",)).start()
except RuntimeError:
    print("no thread")
"""
_BEGUN = "\n"
_BEGIN = ("/bin/sh", "-c", 'echo; exec "$@" 2>/dev/null', "sh")
"""Writes `_BEGUN` before the program exists, which cannot forge or hide it. Without it, an exit code is that of
bubblewrap, `setpriv` or `prlimit`, to which standard error is left."""
_SHOWN_BYTES = 500
"""Of their standard error."""


class Ending(StrEnum):
    """How a program ended."""

    EXITED = "exited"
    """By itself; see the exit code."""
    TIMEOUT = "timeout"
    """It was killed at the wall or CPU time limit."""
    OUTPUT = "output"
    """It was killed because it wrote more than `Limits.output_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program."""

    wall_s: float = 6.0
    """Without the time in which this process was stopped, and the program perhaps with it."""
    cpu_s: int = 5
    """Of each process."""
    total_cpu_s: float = math.inf
    """Of all processes together, with those that have ended."""
    memory_bytes: int = 512 << 20
    """Address space of each process."""
    num_processes: int = 16
    """Processes and threads at a time."""
    file_bytes: int = 16 << 20
    """All files in `/tmp` together, which are in memory; a single file is no larger."""
    output_bytes: int = 1 << 20
    """Standard output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program did."""

    ending: Ending
    code: int
    """Exit code; negative for a signal, -9 for a killed program."""
    output: str
    """Standard output, in UTF-8; bytes that are not are replaced."""
    cpu_s: float = 0.0
    """CPU seconds of all its processes but those that were killed at its end. It is 0 if this process does not adopt
    orphans (`adopt_orphans`)."""
    wall_s: float = 0.0
    """Seconds that it took, as `Limits.wall_s` counts them."""


def isolation_problem() -> str:
    """Why programs cannot be isolated on this machine, with the fix; empty if they can."""
    return _isolation_problem()


@cache
def _isolation_problem() -> str:
    if shutil.which("bwrap") is None:
        return "bubblewrap is missing, and programs of a model run nowhere else; install the package `bubblewrap`"
    try:
        outcome = run_program(_SELF_TEST, limits=Limits(wall_s=60.0))
    except OSError as error:
        reason = str(error)
    else:
        if outcome.output == "thread\n":
            return ""
        if outcome.output == "no thread\n":
            return _no_thread()
        reason = f"exit code {outcome.code} of a program that prints a word"
    return (
        f"bubblewrap cannot isolate a program here ({reason}); permit user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container: "
        "--security-opt seccomp=unconfined), or run as root"
    )


def _no_thread() -> str:
    limits = Limits()
    return (
        f"an isolated program can start no thread here, at a limit of {limits.num_processes} processes and threads "
        f"(RLIMIT_NPROC). Kernels before 5.14 count all processes of this user towards it, and this one is "
        f"{platform.release()}: run as root, or take a newer kernel"
    )


def run_program(source: str, *, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a Python program, isolated, and wait for its end.

    Args:
        source: the program.
        stdin: its standard input.
        limits: the defaults of `Limits` if None.

    Raises:
        OSError: bubblewrap cannot be started, or has not run the program to its end.
    """
    limits = limits or Limits()
    if limits.wall_s <= 0 or limits.total_cpu_s <= 0:
        return Outcome(ending=Ending.TIMEOUT, code=-9, output="")
    with (
        tempfile.TemporaryFile() as program,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as info,
        tempfile.TemporaryFile() as errors,
    ):
        program.write(source.encode("utf-8", "surrogatepass"))
        program.seek(0)
        given.write(stdin.encode("utf-8", "surrogatepass"))
        given.seek(0)
        arguments = ["--file", str(program.fileno()), "/tmp/program.py", "--info-fd", str(info.fileno())]
        command = _command(["/tmp/program.py"], limits, more=arguments)
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[program.fileno(), info.fileno()],
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout as output:
            outcome = _wait(process, output, limits)
        cpu_s = _end(info)
        if outcome.ending is Ending.EXITED and (outcome.code < 0 or not outcome.output.startswith(_BEGUN)):
            errors.seek(0)
            said = errors.read(_SHOWN_BYTES).decode("utf-8", "replace").strip()
            raise OSError(f"{said or f'exit code {outcome.code} of bubblewrap'}; the program has not run to its end")
        return replace(outcome, cpu_s=cpu_s, output=outcome.output.removeprefix(_BEGUN))


def _wait(process: "subprocess.Popen[bytes]", output: IO[bytes], limits: Limits) -> Outcome:
    """Read to the end of the output, within the limits; `_BEGUN` stands before it."""
    most_bytes = len(_BEGUN) + limits.output_bytes
    clock = AwakeClock()
    deadline = limits.wall_s
    look = min(deadline, _LOOK_EVERY_S)
    text, ending = bytearray(), Ending.EXITED
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if (now := clock()) >= look:
                if now >= deadline or _used_cpu_s(process.pid) >= limits.total_cpu_s:
                    ending = Ending.TIMEOUT
                    break
                look = min(deadline, now + _LOOK_EVERY_S)
            if not selector.select(look - now):
                continue
            block = os.read(output.fileno(), 1 << 16)
            text += block
            if len(text) > most_bytes:
                ending = Ending.OUTPUT
                break
            if not block:
                break
    code = _code(process, clock, deadline) if ending is Ending.EXITED else process.poll()
    if code is None:
        process.kill()  # bubblewrap's first process dies with it, and all others with that one
        code = process.wait()
        ending = Ending.TIMEOUT if ending is Ending.EXITED else ending
    if code in (128 + 24, 128 + 9, -24) and ending is Ending.EXITED:  # SIGXCPU, then SIGKILL
        ending = Ending.TIMEOUT
    shown = bytes(text[:most_bytes]).decode("utf-8", "replace")
    return Outcome(ending=ending, code=code, output=shown, wall_s=clock())


def _code(process: "subprocess.Popen[bytes]", clock: AwakeClock, deadline: float) -> int | None:
    """Exit code of a program that has closed its output; None if it goes on until the deadline."""
    while (code := process.poll()) is None and (left_s := deadline - clock()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(left_s, _LOOK_EVERY_S))
    return code


def _used_cpu_s(pid: int) -> float:
    return cpu_seconds([pid, *descendants(pid)])


def _end(info: IO[bytes]) -> float:
    """End the first process inside, and all others with it; returns their CPU seconds (`Outcome.cpu_s`).

    bubblewrap does not wait for that process. An adopted one would stay as a zombie, and a reward worker would have too
    many processes after some tests.
    """
    info.seek(0)
    with suppress(ValueError, ChildProcessError):  # bubblewrap was killed before it named it; it is no child of ours
        pid: int = json.load(info)["child-pid"]
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # a child's id is not free for others
        kill(pid)
        used = os.wait4(pid, 0)[2]
        return used.ru_utime + used.ru_stime
    return 0.0


def _command(arguments: Sequence[str], limits: Limits, *, more: Sequence[str] = ()) -> list[str]:
    """Command line of an isolated interpreter; `more` are further arguments of bubblewrap."""
    python, prefix = _interpreter()
    system = [path for path in (*_SYSTEM, prefix) if Path(path).exists()]
    mounts = [word for path in system for word in _mount(path)]
    variables = [word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)]
    limited = [
        "prlimit",
        f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}",
        f"--as={limits.memory_bytes}",
        f"--stack={_stack_bytes()}:",  # a program may raise it
        f"--nproc={limits.num_processes}",
        f"--fsize={limits.file_bytes}",
        "--core=0",
        "--nofile=64",
    ]
    return [
        "bwrap",
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *([] if os.geteuid() == 0 else ["--unshare-user"]),
        *("--die-with-parent", "--new-session", "--clearenv", *variables),
        *mounts,
        *("--proc", "/proc", "--dev", "/dev", "--chdir", "/tmp"),
        *("--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", "/tmp"),
        *more,
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        *_without_root(),
        "--",
        *_dropped(),
        *limited,
        *_BEGIN,
        *(python, "-I", "-B", *arguments),
    ]


def _stack_bytes() -> int:
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    return STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)


def _mount(path: str) -> list[str]:
    """Arguments that show a path of the system to the program; other users may pass its parents."""
    parents = [
        word for parent in list(Path(path).parents)[-2::-1] for word in ("--perms", "0755", "--dir", str(parent))
    ]
    if Path(path).is_symlink():
        return [*parents, "--symlink", str(Path(path).readlink()), path]
    return [*parents, "--ro-bind", path, path]


@cache
def _interpreter() -> tuple[str, str]:
    """The interpreter behind a virtual environment, and the folder that it is installed in."""
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return str(base), str(Path(sys.base_prefix).resolve())


def _without_root() -> list[str]:
    """As root: rights that the program's change of user id needs, before the program starts."""
    if os.geteuid() != 0:
        return []
    return ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]


def _dropped() -> list[str]:
    """As root: the change to a user id that no other process has, by which processes are counted."""
    if os.geteuid() != 0:
        return []
    user = FIRST_USER_ID + os.getpid() % 1_000_000
    return [
        "setpriv",
        *(f"--reuid={user}", f"--regid={user}", "--clear-groups"),
        *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"),
    ]
