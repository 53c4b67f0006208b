"""What a run directory holds when a command has ended, in a line or two. Reads names and counts only."""

from dataclasses import dataclass
from pathlib import Path

from launcher.run_dir.checkpoints import Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is left of a run."""

    run_dir: str
    """Empty for a command without a run directory."""
    step: int
    """Of the newest checkpoint; 0 without one."""
    num_metrics: int
    """Steps in `metrics.jsonl`."""
    num_samples: int
    """Steps whose responses are in `samples/`."""
    has_history: bool
    """The newest checkpoint holds a snapshot of the history."""

    def __str__(self) -> str:
        parts = [
            f"checkpoint of step {self.step}" + (" with history" if self.has_history else "") if self.step else "",
            f"metrics of {self.num_metrics} step(s)" if self.num_metrics else "",
            f"samples of {self.num_samples} step(s)" if self.num_samples else "",
        ]
        found = ", ".join(part for part in parts if part)
        return f"{self.run_dir}: {found}" if found else "nothing"


NOTHING = Kept(run_dir="", step=0, num_metrics=0, num_samples=0, has_history=False)


def kept(run_dir: Path | None) -> Kept:
    """What `run_dir` holds; nothing where there is none, or where it cannot be read."""
    if run_dir is None or not run_dir.is_dir():
        return NOTHING
    try:
        newest = Checkpoints(run_dir / "checkpoints").latest()
    except (OSError, ValueError):
        newest = None
    return Kept(
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
