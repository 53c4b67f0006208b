"""The work of an earlier start that a run repeats: all that its records show after the newest checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from launcher.errors import RunDirectoryError
from launcher.run_dir.atomic_files import readable_rows
from launcher.run_dir.status import read_now


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWork:
    """Steps and time between the newest checkpoint and the end of the last start."""

    num_steps: int
    """Finished steps that are repeated."""
    seconds: float
    """From the end of the checkpoint, or from the begin of the first step without one, to the last sign of life."""

    def line(self) -> str:
        """One sentence."""
        return (
            f"the last start ended {self.seconds:.0f} s after its newest checkpoint; {self.num_steps} finished step(s) "
            "are repeated"
        )


def lost_work(run_dir: Path, step: int) -> LostWork | None:
    """What a run that resumes at `step` repeats; None at a first start, or where no status can be read.

    Args:
        run_dir: run directory, before records after `step` are moved aside.
        step: step of the newest checkpoint; 0 without one.
    """
    try:
        last = read_now(run_dir)
    except (RunDirectoryError, OSError):  # it serves one sentence only, and must not keep a run from its start
        last = None
    if last is None:
        return None
    rows, _ = readable_rows(run_dir / "metrics.jsonl")
    repeated = [row for row in rows if isinstance(number := row.get("step"), int) and number >= step]
    pointer = run_dir / "checkpoints" / "latest"
    if pointer.exists():
        begin_s = pointer.stat().st_mtime
    elif repeated and isinstance(ended_s := repeated[0].get("time_s"), int | float):
        step_s = repeated[0].get("timing_s/step")
        begin_s = ended_s - (step_s if isinstance(step_s, int | float) else 0.0)
    else:
        begin_s = last.since_s
    return LostWork(num_steps=len(repeated), seconds=max(0.0, last.last_sign_s - begin_s))
