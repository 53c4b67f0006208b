"""A file that asks a run to stop: `stop.json` in the run directory.

A signal would reach Ray's processes before the controller. The controller looks for the file before each step and
during its rollout, saves a checkpoint and renames the file to `stopped.json`. After the last step the evaluation in
BF16 looks for it. The batch script of a SLURM job writes the same file. A request from before the run's start is
ignored. `stopped.json` has the request from the moment in which the run sees it: the run stops from then on, even if
somebody removes `stop.json`.

Invariant: only who has the run directory's lock answers a request.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import psutil

from launcher.run_dir.atomic_files import replace_text

REQUEST, ANSWERED = "stop.json", "stopped.json"
CHECK_EVERY_S = 1.0
"""A shared file system is asked no more often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """What was asked, and when."""

    reason: str
    requeue: bool = False
    """The SLURM job is to go back into the queue."""
    time_s: float = 0.0
    """Wall clock."""


def write_request(run_dir: Path, *, reason: str, requeue: bool = False) -> None:
    """Ask the run in `run_dir` to stop."""
    _write(run_dir / REQUEST, StopRequest(reason=reason, requeue=requeue, time_s=time.time()))


def _write(path: Path, request: StopRequest) -> None:
    replace_text(path, json.dumps(asdict(request)) + "\n")


def read_request(run_dir: Path, name: str = REQUEST) -> StopRequest | None:
    """The request in `run_dir`; None without one, or for a file that holds none."""
    try:
        row = json.loads((run_dir / name).read_text(encoding="utf-8"))
        return StopRequest(reason=str(row["reason"]), requeue=bool(row["requeue"]), time_s=float(row["time_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def answer_request(run_dir: Path) -> None:
    """The run has stopped: the request is renamed, so that the next start does not see it."""
    with suppress(FileNotFoundError):  # somebody has removed it; the watch has copied it
        (run_dir / REQUEST).replace(run_dir / ANSWERED)


@cache
def _start_s() -> float:
    """Start of this process, by the wall clock at the first call: psutil's value moves when the clock is set."""
    return psutil.Process().create_time()


@dataclass(slots=True, kw_only=True)
class StopWatch:
    """Whether the run of this process is asked to stop; reads the file at most once per `CHECK_EVERY_S`."""

    run_dir: Path
    since_s: float = field(default_factory=_start_s)
    """Start of this process, wall clock. Older requests were meant for an earlier run."""
    _had_request: bool = field(init=False)
    """Whether there may have been a request when the watch began. Of a later one, no time is compared: the clock may
    have been set meanwhile."""
    _for_earlier: StopRequest | None = field(default=None, init=False)
    """That request, if it was meant for an earlier run."""
    _checked_s: float = field(default=-CHECK_EVERY_S, init=False)
    _found: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._had_request = (self.run_dir / REQUEST).exists()
        self._look()

    def __call__(self) -> bool:
        """Whether there is a request; stays true."""
        now_s = time.monotonic()
        if not self._found and now_s - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now_s
            request = self._look()
            self._found = request is not None
            if request is not None:
                with suppress(OSError):  # a full disk; `answer_request` renames the file itself
                    _write(self.run_dir / ANSWERED, request)
        return self._found

    def _look(self) -> StopRequest | None:
        """The request for this run; None without one."""
        request = read_request(self.run_dir)
        if request is not None and self._had_request:  # the first one that can be read
            self._had_request = False
            self._for_earlier = request if request.time_s < self.since_s - 1 else None
        return None if request == self._for_earlier else request
