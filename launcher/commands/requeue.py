"""Decides whether a SLURM job goes back into the queue when its run has ended. Pure.

A run that was asked to stop goes on later from its checkpoint; so does a run that lost a process or a node. Nothing
loops: at most `MAX_REQUEUES` requeues without a new step, whoever requeued the job.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.endings.kinds import Ending

MAX_REQUEUES = 2
"""Without a new step in between."""
LOST = (Ending.DEADLINE.code, Ending.PROCESS_LOST.code)
"""Exit codes after which a node may have died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """What happens to the job."""

    again: bool
    why: str
    """One sentence for the log."""


def may_start(starts: Sequence[int], step: int) -> bool:
    """Whether a job may start its run at `step`; `starts` are the steps of earlier starts. SLURM requeues by itself."""
    return _tries(starts, step) <= MAX_REQUEUES


def decide(code: int, *, asked: bool, node_lost: bool, starts: Sequence[int], step: int) -> Requeue:
    """Whether a job whose run ended with exit code `code` is requeued.

    Args:
        code: exit code of the run.
        asked: the stop request asks for a requeue.
        node_lost: processes of a node ended before the run.
        starts: step of each start of the run, this one included.
        step: step of the newest checkpoint now.
    """
    if code == Ending.STOPPED.code and not asked:
        return Requeue(again=False, why=f"the run was stopped by hand after step {step}: not requeued")
    if code == Ending.STOPPED.code:
        reason = f"the run stopped on request after step {step}"
    elif code in LOST or (code != 0 and node_lost):
        reason = (
            f"{'a node' if node_lost else 'a process'} was lost (exit code {code}); the checkpoint is of step {step}"
        )
    else:
        return Requeue(again=False, why="the run is done" if code == 0 else f"exit code {code} is not requeued")
    tries = _tries(starts, step)
    if tries > MAX_REQUEUES:
        return Requeue(again=False, why=f"{reason}; not requeued, {tries} starts made no new step")
    return Requeue(again=True, why=f"{reason}: requeued")


def _tries(starts: Sequence[int], step: int) -> int:
    """How many of the last starts began at `step`."""
    return next((number for number, start in enumerate(reversed(starts)) if start != step), len(starts))
