"""Compares a disturbed run with an undisturbed one, and looks for what it left behind."""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.faults.cells import Cell
from benchmarks.faults.example import NUM_STEPS, PROMPTS, SAMPLES
from benchmarks.faults.inject import Ended
from benchmarks.harness.example_run import read_metrics
from benchmarks.harness.record import Row

NOT_REPEATABLE = ("timing_s/", "perf/", "timeline/", "checkpoint/", "time_s")
REPAIRS = (
    "trainer/restarts",
    "trainer/repeated_steps",
    "engine/restarts",
    "engine/hung",
    "engine/reissued_groups",
    "publish/repeated",
    "reward/scorer_restarts",
    "reward/text_actor_restarts",
    "reward/worker_restarts",
    "reward/repeated_calls",
)
REPEATED = {
    "reissued_groups": "engine/reissued_groups",
    "repeated_publishes": "publish/repeated",
    "scorer_restarts": "reward/scorer_restarts",
    "repeated_calls": "reward/repeated_calls",
}
"""Columns of what was repeated, beside steps, and the metrics that count it."""
_SHM = re.compile(r"\.?mrl-.+")


def outcome(cell: Cell, run_dir: Path, undisturbed: Path, ended: Ended) -> Row:
    """One row of the record."""
    steps = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    complete = [step["batch/responses"] == PROMPTS * SAMPLES for step in steps] == [True] * NUM_STEPS
    row: dict[str, str | int | float | bool] = {
        "cell": cell.name,
        "role": cell.role,
        "fault": cell.fault,
        "phase": cell.phase,
        "run": cell.run,
        "exit_codes": ", ".join(map(str, ended.codes)),
        "was_hit": ended.hit_at_s is not None,
        **_until_next_step(cell, steps, ended),
        "starts": len(ended.codes),
        "trainer_restarts": steps[-1].get("trainer/restarts", 0) if steps else 0,
        "engine_restarts": steps[-1].get("engine/restarts", 0) if steps else 0,
        "repeated_steps": _abandoned(run_dir),
        **{column: total(steps, metric) for column, metric in REPEATED.items()},
        "same_groups": complete,
        "left_behind": len(left_behind()),
    }
    if cell.run == "exact":
        row["same_metrics"] = _comparable(run_dir) == _comparable(undisturbed)
        row["same_weights"] = _weights(run_dir) == _weights(undisturbed)
    row["as_promised"] = _is_as_promised(row)
    return row


def total(steps: Sequence[Mapping[str, float]], metric: str) -> float:
    """A metric that counts since a process started, added up over the starts of a run: each begins at 0."""
    counted, before = 0.0, 0.0
    for step in steps:
        now = step.get(metric, 0.0)
        counted += now - before if now >= before else now
        before = now
    return counted


def _until_next_step(cell: Cell, steps: Sequence[Mapping[str, float]], ended: Ended) -> dict[str, float]:
    """Seconds from the signal to the end of the step that was under way, or to the end of the run after the last step.

    The row of a step that was repeated has the time of the repetition.
    """
    if ended.hit_at_s is None:
        return {}
    step = cell.moment.step
    ends = [row["time_s"] for row in steps if row["step"] == step and row["time_s"] > ended.hit_at_s]
    return {"until_next_step_s": round((ends[0] if ends else ended.ended_at_s) - ended.hit_at_s, 1)}


def _is_as_promised(row: Row) -> bool:
    promises = ("same_groups", "same_metrics", "same_weights")
    ended = str(row["exit_codes"]).rsplit(", ", 1)[-1] == "0"
    return ended and bool(row["was_hit"]) and all(row.get(name, True) for name in promises) and row["left_behind"] == 0


def _abandoned(run_dir: Path) -> int:
    path = run_dir / "metrics.abandoned.jsonl"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def _comparable(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [
        {name: value for name, value in row.items() if not name.startswith(NOT_REPEATABLE) and name not in REPAIRS}
        for row in rows
    ]


def _weights(run_dir: Path) -> str:
    path = run_dir / "policy" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def left_behind(shm: Path = Path("/dev/shm")) -> list[Path]:
    """Shared memory of runs whose owner is dead; a living one holds a lock (`rollout.transports.shm_files`)."""
    return [path for path in shm.iterdir() if _SHM.fullmatch(path.name) and not _is_held(path)]


def _is_held(path: Path) -> bool:
    """Whether a living process owns a segment, or a folder of segments; what has just been removed counts as held."""
    try:
        descriptor = os.open(path / "LOCK" if path.is_dir() else path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return not path.is_dir()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
