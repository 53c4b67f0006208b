"""Runs the command line like a batch system, and sends a signal to one process when a phase begins."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.cells import PHASES, ROLES, SIGNALS, Cell
from launcher.endings.kinds import Ending
from launcher.run_dir.status import STATUS

AGAIN = (Ending.DEADLINE.code, Ending.PROCESS_LOST.code, -9)
"""Exit codes after which a batch system starts the run again, as `launcher.commands.requeue` decides."""
MAX_STARTS = 3
LIMIT_S = 900.0
"""Of one start: a run that hangs is killed, and its exit code is None."""
MAX_DELAY_S = 0.1
"""Most time between the begin of the phase and the signal."""
_POLL_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that was disturbed once."""

    codes: tuple[int | None, ...]
    """Exit code of each start."""
    seconds: float
    """From the first start to the last end."""
    was_hit: bool
    """Whether the process lived when the phase began."""


def run_disturbed(config: Path, run_dir: Path, cell: Cell | None, *, seed: int) -> Ended:
    """Execute a run to its end, and start it again where a batch system would."""
    codes: list[int | None] = []
    was_hit = cell is None
    began = time.monotonic()
    with run_dir.with_suffix(".log").open("wb") as log:
        while len(codes) < MAX_STARTS:
            line = [sys.executable, "-m", "launcher", "run", str(config), f"run_dir={run_dir}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT)
            if cell is not None and not was_hit:
                was_hit = _disturb(process, run_dir, cell, random.Random(seed))
            codes.append(_wait(process))
            if codes[-1] not in AGAIN:
                break
    return Ended(codes=tuple(codes), seconds=time.monotonic() - began, was_hit=was_hit)


def _disturb(process: subprocess.Popen[bytes], run_dir: Path, cell: Cell, generator: random.Random) -> bool:
    """Send the signal of a cell; False if the run ended before."""
    while not _is_in_phase(run_dir, cell):
        if process.poll() is not None:
            return False
        time.sleep(_POLL_S)
    time.sleep(generator.uniform(0.0, MAX_DELAY_S))
    targets = _targets(process, cell.role)
    while not targets and _is_in_phase(run_dir, cell) and process.poll() is None:  # it has not started yet
        time.sleep(_POLL_S)
        targets = _targets(process, cell.role)
    if not targets:
        return False
    generator.choice(targets).send_signal(SIGNALS[cell.fault])
    return True


def _is_in_phase(run_dir: Path, cell: Cell) -> bool:
    name, step = PHASES[cell.phase]
    try:
        now = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(now["phase"] == name and now["step"] == step)


def _targets(process: subprocess.Popen[bytes], role: str) -> Sequence[psutil.Process]:
    """Living processes of a role, in the order of their ids."""
    if role == "controller":
        return [psutil.Process(process.pid)]
    try:
        descendants = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    if role == "reward worker":
        found = [each for each in descendants if "forkserver" in _title(each) and "forkserver" in _title(each.parent())]
    else:
        found = [each for each in descendants if _title(each).startswith(ROLES[role])]
    return sorted(found, key=lambda each: each.pid)


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
