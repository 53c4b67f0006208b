"""Start of a run: step 0, or the state in the newest checkpoint of its run directory."""

from dataclasses import dataclass, field
from pathlib import Path

from history.lengths.book import LengthBook
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
    lengths: LengthBook = field(default_factory=LengthBook)
    """Empty if the checkpoint has none."""
    order: OrderState | None = None
    guard: GuardState = field(default_factory=GuardState)
    lost: LostWork | None = None
    """Work of an earlier start that is repeated; None at a first start."""
    notes: tuple[str, ...] = ()
    """Sentences about damaged files without which the run goes on."""


def resume_point(directory: RunDirectory) -> ResumePoint:
    """The start of the run in `directory`; records after that point are moved aside.

    Raises:
        RunDirectoryError: the newest checkpoint is gone, or has no readable state.
    """
    newest = directory.latest_checkpoint()
    step, folder = newest or (0, None)
    order, guard = _read_state(folder, step) if folder is not None else (None, GuardState())
    notes = directory.move_damaged_lines()
    lost = lost_work(directory.path, step)
    directory.resume_at(step)
    if folder is None:
        return ResumePoint(lost=lost, notes=tuple(notes))
    lengths = LengthBook()
    if (folder / LENGTHS).exists():
        try:
            lengths.load(folder / LENGTHS)
        except (OSError, ValueError) as error:  # they only foretell
            notes.append(f"forecasts of response lengths begin anew: {error}")
    return ResumePoint(
        first_step=step,
        trainer=str(folder / "trainer"),
        history=str(folder / HISTORY) if (folder / HISTORY).exists() else "",
        lengths=lengths,
        order=order,
        guard=guard,
        lost=lost,
        notes=tuple(notes),
    )


def _read_state(checkpoint: Path, step: int) -> tuple[OrderState, GuardState]:
    try:
        state = read_state(checkpoint)
        if state.get("finished_steps", step) != step:
            raise ValueError(f"it is of step {state['finished_steps']}")
        order = OrderState.from_json(_mapping(state["prompt_order"]))
        if min(order.cursor, *order.consumed_ahead, 0) < 0:
            raise ValueError("prompt order: a position is negative")
        return order, GuardState.from_json(state.get("guard"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise RunDirectoryError(
            f"checkpoint {checkpoint} has no readable state ({type(error).__name__}: {error}); "
            + Checkpoints(checkpoint.parent).instead_of(step)
        ) from error


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no mapping")
    return value
