"""Start of a run: step 0, or the state in the newest checkpoint of its run directory."""

from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import RunDirectoryError
from launcher.run_dir.checkpoints import Checkpoints
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.lost_work import LostWork, lost_work
from launcher.run_dir.saves import HISTORY, LENGTHS, read_state
from megatron_rl.algorithm.guard import GuardState
from rollout.data.order import OrderState


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Start of a run: step 0, or the step after its newest checkpoint."""

    first_step: int = 0
    trainer: str = ""
    """Folder of the trainer's checkpoint."""
    history: str = ""
    """Folder of the history's snapshot; empty if the checkpoint has none."""
    lengths: Path | None = None
    """File of the response lengths; None if the checkpoint has none."""
    order: OrderState | None = None
    guard: GuardState = field(default_factory=GuardState)
    lost: LostWork | None = None
    """Work of an earlier start that is repeated; None at a first start."""


def resume_point(directory: RunDirectory) -> ResumePoint:
    """The start of the run in `directory`; records after that point are moved aside.

    Raises:
        RunDirectoryError: the newest checkpoint is gone, or has no readable state.
    """
    newest = directory.latest_checkpoint()
    lost = lost_work(directory.path, newest[0] if newest else 0)
    if newest is None:
        directory.resume_at(0)
        return ResumePoint(lost=lost)
    step, folder = newest
    directory.resume_at(step)
    try:
        state = read_state(folder)
        order, guard = state["prompt_order"], GuardState.from_json(state.get("guard"))
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(
            f"checkpoint {folder} has no readable state ({type(error).__name__}: {error}); "
            + Checkpoints(folder.parent).instead_of(step)
        ) from error
    assert isinstance(order, dict)
    return ResumePoint(
        first_step=step,
        trainer=str(folder / "trainer"),
        history=str(folder / HISTORY) if (folder / HISTORY).exists() else "",
        lengths=folder / LENGTHS if (folder / LENGTHS).exists() else None,
        order=OrderState.from_json(order),
        guard=guard,
        lost=lost,
    )
