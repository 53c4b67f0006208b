"""Processes of the stages of one call. Each is a family: a process with all that it has started, ended as a whole.

A stage has a session of its own, so a signal to the command does not reach it: the command ends the families.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil


class CallEndedError(Exception):
    """The call was ended before the stage had ended, so the stage has no result."""


class Families:
    """Families that run now; threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def run(self, command: Sequence[str], *, root: Path, log: Path, limit_s: float) -> int | None:
        """Run a command in the folder `root`; its output goes to `log`.

        Returns its exit code, or None if it was killed after `limit_s` seconds.

        Raises:
            CallEndedError: `end` was called before the command had ended.
            OSError: the command cannot be started, or the log cannot be written.
        """
        with log.open("wb") as output:
            with self._lock:
                if self._ended:
                    raise CallEndedError
                process = subprocess.Popen(
                    command, cwd=root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
                self._running.add(process)
            exit_code = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    exit_code = process.wait(timeout=limit_s)
            finally:
                _kill(process)
                with self._lock:
                    self._running.remove(process)
        if self._ended:
            raise CallEndedError
        return exit_code

    def end(self) -> None:
        """Kill all families; none begins after this."""
        with self._lock:
            self._ended = True
            running = tuple(self._running)
        for process in running:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a family: its process, all below it, and its group."""
    family = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
