"""Ends a command that failed: writes the log, prints one screen, returns the exit code. SIGTERM becomes an error.

The log is `logs/driver-0.log` of the run directory, a file beside the command's output, or one in the temporary
directory, the first of them that can be written.
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

from launcher.cluster.node import memory_kills
from launcher.endings.kept import kept
from launcher.endings.kinds import Ending, Verdict, causes, judge
from launcher.endings.screen import first_traceback, log_of, one_line, screen
from launcher.errors import LaunchError, Terminated
from rollout.failures import plain

DRIVER_LOG = Path("logs") / "driver-0.log"
"""In the run directory."""


@dataclass(slots=True, kw_only=True)
class Command:
    """What is known of the command that runs; the command fills it in as soon as the configuration is read."""

    name: str
    run_dir: Path | None = None
    """Directory of the run; None for a command that has none."""
    output: Path | None = None
    """What the command writes; its log lies beside it."""
    kills_before: int = field(default_factory=memory_kills)
    """Processes that the memory killer had ended before."""

    def logs(self) -> list[Path]:
        """Where the log may be, the best place first."""
        name = f"megatron-rl-{self.name}-{os.getpid()}.log"
        found = [Path(tempfile.gettempdir()) / name]
        if self.output is not None:
            found.insert(0, self.output.with_name(f"{self.output.name}.log"))
        if self.run_dir is not None:
            found.insert(0, self.run_dir / DRIVER_LOG)
        return found


def conclude(error: BaseException, command: Command) -> int:
    """Write the log, print what a person has to know, and return the exit code."""
    launch = next((one for one in causes(error) if isinstance(one, LaunchError)), None)
    verdict = judge(error, memory_kills=memory_kills() - command.kills_before)
    if launch is not None and verdict.ending is Ending.USER_INPUT:
        print(f"megatron-rl {command.name}: {launch}", file=sys.stderr)
        return verdict.ending.code
    rest = kept(command.run_dir)
    if verdict.ending in (Ending.INTERRUPTED, Ending.TERMINATED):
        print(one_line(verdict, command=command.name, kept=rest), file=sys.stderr)
        return verdict.ending.code
    log = _append(command.logs(), _record(error, verdict))
    if verdict.ending is Ending.DEFECT:
        print(first_traceback(error), file=sys.stderr)
    log_dir = command.run_dir / DRIVER_LOG.parent if command.run_dir is not None else None
    text = screen(verdict, command=command.name, kept=rest, log=log, process_log=log_of(log_dir, verdict))
    print(text, file=sys.stderr)
    return verdict.ending.code


def _record(error: BaseException, verdict: Verdict) -> str:
    """What the log is told: when, what was started, how it ended, every traceback."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    trace = plain("".join(traceback.format_exception(error)))
    return f"\n== {when} {' '.join(sys.argv)}: {verdict.ending.title} (exit code {verdict.ending.code})\n{trace}\n"


def _append(paths: Sequence[Path], text: str) -> str:
    """Append to the first of `paths` that can be written and return its path, or why there is no log."""
    failure = ""
    for path in paths:
        if not path.parent.is_dir():
            continue
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            failure = f"no log could be written: {error.strerror}: {path}"
        else:
            return str(path)
    return failure or "no log could be written"


@contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM raises `Terminated` in the body, so that processes are ended as after an error; once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
