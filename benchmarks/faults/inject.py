"""Runs the command line like a batch system, and sends a signal to one process, or to all, when a phase begins."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.cells import ROLES, SIGNALS, WHOLE_JOB, Cell
from launcher.endings.kinds import Ending
from launcher.run_dir.status import STATUS

AGAIN = (Ending.DEADLINE.code, Ending.PROCESS_LOST.code, -9)
"""Exit codes after which a batch system starts the run again, as `launcher.commands.requeue` decides."""
MAX_STARTS = 3
LIMIT_S = 900.0
"""Of one start: a run that hangs is killed, and its exit code is None."""
_POLL_S = 0.002
_SCORING_POLL_S = 0.02
"""The same while calls of the reward function are looked for: a look reads all processes of the machine."""
_SERVER = "rollout.rewards.worker_server"
"""In the titles of reward workers and of their parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that was disturbed once."""

    codes: tuple[int | None, ...]
    """Exit code of each start."""
    hit_at_s: float | None
    """Time of the signal, wall clock; None if the process was not there."""
    ended_at_s: float
    """End of the last start, wall clock."""


def run_disturbed(config: Path, run_dir: Path, cell: Cell | None, *, seed: int) -> Ended:
    """Execute a run to its end, and start it again where a batch system would."""
    codes: list[int | None] = []
    hit_at_s: float | None = None
    with run_dir.with_suffix(".log").open("wb") as log:
        while len(codes) < MAX_STARTS:
            line = [sys.executable, "-m", "launcher", "run", str(config), f"run_dir={run_dir}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT)
            if cell is not None and hit_at_s is None:
                hit_at_s = _disturb(process, run_dir, cell, random.Random(seed))
            codes.append(_wait(process))
            if codes[-1] not in AGAIN:
                break
    return Ended(codes=tuple(codes), hit_at_s=hit_at_s, ended_at_s=time.time())


def _disturb(process: subprocess.Popen[bytes], run_dir: Path, cell: Cell, generator: random.Random) -> float | None:
    """Send the signal of a cell; returns its time. None if the run or the phase ended before."""
    while not _is_in_phase(run_dir, cell):
        if process.poll() is not None:
            return None
        time.sleep(_POLL_S)
    if cell.moment.scores:
        _wait_for_victims(process, run_dir, cell)
    time.sleep(generator.uniform(0.0, cell.moment.max_delay_s))
    found = _wait_for_victims(process, run_dir, cell)
    if not found:
        return None
    hit = found if cell.role == WHOLE_JOB else [generator.choice(found)]
    _send(hit, SIGNALS[cell.fault])
    hit_at_s = time.time()
    if cell.stopped_s:
        time.sleep(cell.stopped_s)
        _send(generator.sample(hit, len(hit)), signal.SIGCONT)  # SLURM promises no order
    return hit_at_s


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _wait_for_victims(process: subprocess.Popen[bytes], run_dir: Path, cell: Cell) -> Sequence[psutil.Process]:
    """Processes that a cell may hit; they may not have started yet. Empty if the run or the phase ends."""
    found = victims(process, cell)
    while not found and _is_in_phase(run_dir, cell) and process.poll() is None:
        time.sleep(_SCORING_POLL_S if cell.moment.scores else _POLL_S)
        found = victims(process, cell)
    return found


def _is_in_phase(run_dir: Path, cell: Cell) -> bool:
    moment = cell.moment
    try:
        now = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    is_in_part = not moment.part or now["part"] == moment.part
    return bool(now["phase"] == moment.phase and now["step"] == moment.step and is_in_part)


def victims(process: subprocess.Popen[bytes], cell: Cell) -> Sequence[psutil.Process]:
    """Processes that a cell may hit now. If it hits scoring, a call is under way, and a reward worker has one."""
    found = targets(process, cell.role)
    if not found or not cell.moment.scores:
        return found
    busy = [each for each in targets(process, "reward worker") if _has_call(each)]
    if cell.role == "reward worker":
        return busy
    return found if busy else []


def _has_call(worker: psutil.Process) -> bool:
    """Calls of `benchmarks.faults.slow_reward` have a process of their own."""
    try:
        return bool(worker.children())
    except psutil.NoSuchProcess:
        return False


def targets(process: subprocess.Popen[bytes], role: str) -> Sequence[psutil.Process]:
    """Living processes of a role, in the order of their ids."""
    if role == "controller":
        return [psutil.Process(process.pid)]
    try:
        descendants = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    if role == WHOLE_JOB:
        return [psutil.Process(process.pid), *descendants]
    if role in ("reward worker", "server of reward workers"):
        is_worker = role == "reward worker"
        family = [each for each in descendants if _SERVER in _title(each)]
        found = [each for each in family if (_SERVER in _title(_parent(each))) == is_worker]
    else:
        found = [each for each in descendants if _title(each).startswith(ROLES[role])]
    return sorted(found, key=lambda each: each.pid)


def _parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.Error:
        return None


def _title(process: psutil.Process | None) -> str:
    try:
        return " ".join(process.cmdline()) if process is not None else ""
    except psutil.Error:
        return ""


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            each.kill()
        process.wait()
        return None
