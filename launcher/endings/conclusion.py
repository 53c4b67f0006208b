"""Ends a failed command: writes the log, prints one screen, returns the exit code. SIGTERM becomes an error.

The log is the first writable file of: `logs/driver-0.log` of the run directory, a file beside the command's output, a
file in the temporary directory.
"""

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from history.own_files import opener
from launcher.cluster.memory_limit import memory_kills
from launcher.cluster.node import END_OF_RAY
from launcher.endings.kinds import Ending, Verdict, causes, judge
from launcher.endings.saved_work import saved_work
from launcher.endings.screen import first_traceback, one_line, process_log_path, screen
from launcher.errors import LaunchError, Terminated
from rollout.failures import plain

DRIVER_LOG = Path("logs") / "driver-0.log"
"""In the run directory."""


@dataclass(slots=True, kw_only=True)
class Command:
    """Facts about the running command, which sets them as soon as it knows them."""

    name: str
    run_dir: Path | None = None
    """Directory of the run; None for a command without one."""
    output: Path | None = None
    """File or directory that the command writes; the log is written beside it."""
    in_8_bits: bool = False
    """Whether its engines have weights in 8 bits."""
    kills_before: int = field(default_factory=memory_kills)
    """Processes that the kernel's out-of-memory killer had ended before the command, or before the end of its last step
    but one.
    """
    _kills_at_end: int | None = None
    """The same at the end of the newest step."""

    def step_finished(self) -> None:
        """A step is over: a process that was killed before this step does not end the command.

        One that was killed within it may: a process that nobody needed since is met in the next step.
        """
        if self._kills_at_end is not None:
            self.kills_before = self._kills_at_end
        self._kills_at_end = memory_kills()

    @property
    def process_logs(self) -> Path | None:
        """Folder with the logs of the command's processes; None if they are not kept."""
        if self.run_dir is not None:
            return self.run_dir / DRIVER_LOG.parent
        return None if self.output is None else logs_beside(self.output)

    def logs(self) -> list[Path]:
        """Possible paths of the log, in order of preference."""
        paths = []
        if self.run_dir is not None:
            paths.append(self.run_dir / DRIVER_LOG)
        if self.output is not None:
            paths.append(self.output.with_name(f"{self.output.name}.log"))
        return [*paths, Path(tempfile.gettempdir()) / f"megatron-rl-{self.name}-{os.getpid()}.log"]


def logs_beside(output: Path) -> Path:
    """Folder of the logs of the processes of a command that writes `output` and has no run directory."""
    return output.with_name(f"{output.name}.logs")


def conclude(error: BaseException, command: Command) -> int:
    """Write the log, print the screen and return the exit code."""
    launch_error = next((cause for cause in causes(error) if isinstance(cause, LaunchError)), None)
    kills = max(memory_kills() - command.kills_before, 0)  # a group that has ended takes its count along
    verdict = judge(error, memory_kills=kills, in_8_bits=command.in_8_bits)
    if launch_error is not None and verdict.ending is Ending.USER_INPUT:
        print(f"megatron-rl {command.name}: {launch_error}", file=sys.stderr)
        return verdict.ending.code
    saved = saved_work(command.run_dir)
    if verdict.ending in (Ending.INTERRUPTED, Ending.TERMINATED, Ending.STOPPED):
        print(one_line(verdict, command=command.name, saved=saved), file=sys.stderr)
        return verdict.ending.code
    log = _append(command.logs(), _record(error, verdict))
    if verdict.ending is Ending.DEFECT:
        print(first_traceback(error), file=sys.stderr)
    process_log = process_log_path(command.process_logs, verdict)
    text = screen(verdict, command=command.name, saved=saved, log=log, process_log=process_log)
    print(text, file=sys.stderr)
    return verdict.ending.code


def leave(code: int) -> int:
    """Return the exit code; exit at once if Ray still waits in its end, because an orderly exit waits for Ray again."""
    if any(thread.name == END_OF_RAY for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _record(error: BaseException, verdict: Verdict) -> str:
    """Text for the log: time, command line, ending, all tracebacks."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    trace = plain("".join(traceback.format_exception(error)))
    return f"\n== {when} {' '.join(sys.argv)}: {verdict.ending.title} (exit code {verdict.ending.code})\n{trace}\n"


def _append(paths: Sequence[Path], text: str) -> str:
    """Append to the first writable file of `paths`; returns its path, or the reason why there is no log."""
    failure = ""
    for path in paths:
        if not path.parent.is_dir():
            continue
        try:
            with open(path, "a", encoding="utf-8", opener=opener) as file:
                file.write(text)
        except OSError as error:
            failure = f"no log could be written: {error.strerror}: {path}"
        else:
            return str(path)
    return failure or "no log could be written"


@contextmanager
def termination_raises() -> Iterator[None]:
    """Raises `Terminated` on the first SIGTERM, so that processes are ended as after an error.

    The body itself sees a KeyboardInterrupt: it is the only exception of a signal that leaves a waiting call of Ray.
    Whatever the body makes of it, `Terminated` leaves this context.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    signals: list[int] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except BaseException as error:
        if signals and not isinstance(error, Terminated):
            raise Terminated from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
