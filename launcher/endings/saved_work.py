"""Work that a failed command has saved in its run directory. Reads names and counts only."""

from dataclasses import dataclass
from pathlib import Path

from launcher.run_dir.checkpoints import Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWork:
    """Contents of a run directory."""

    run_dir: str
    """Empty for a command without a run directory."""
    step: int
    """Step of the newest checkpoint; 0 without a checkpoint."""
    num_metrics: int
    """Steps in `metrics.jsonl`."""
    num_samples: int
    """Steps whose responses are in `samples/`."""
    has_history: bool
    """Whether the newest checkpoint holds a snapshot of the history."""

    def __str__(self) -> str:
        parts = [
            f"checkpoint of step {self.step}" + (" with history" if self.has_history else "") if self.step else "",
            f"metrics of {self.num_metrics} step(s)" if self.num_metrics else "",
            f"samples of {self.num_samples} step(s)" if self.num_samples else "",
        ]
        contents = ", ".join(part for part in parts if part)
        return f"{self.run_dir}: {contents}" if contents else "nothing"


NOTHING = SavedWork(run_dir="", step=0, num_metrics=0, num_samples=0, has_history=False)


def saved_work(run_dir: Path | None) -> SavedWork:
    """The work saved in `run_dir`; `NOTHING` if there is no such directory, parts that cannot be read left out."""
    if run_dir is None or not run_dir.is_dir():
        return NOTHING
    try:
        newest = Checkpoints(run_dir / "checkpoints").latest()
    except (OSError, ValueError):
        newest = None
    return SavedWork(
        run_dir=str(run_dir),
        step=newest[0] if newest else 0,
        num_metrics=_lines(run_dir / "metrics.jsonl"),
        num_samples=len(list((run_dir / "samples").glob("step-*.jsonl"))),
        has_history=newest is not None and (newest[1] / "history").exists(),
    )


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0
