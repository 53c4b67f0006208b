"""The built-in loss, in which trainer rank 1 of a run hangs twice: in an endless loop, and, after a restart, frozen.

Only processes hang that begin once `trainer-1.armed` is among the run's logs, so that another fault can come first.
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.algorithm.columns import LossInputs, TokenLosses
from megatron_rl.algorithm.losses import clipped_surrogate
from megatron_rl.algorithm_settings import ClippedSurrogate
from rollout.processes import VARIABLE

_RANK = "trainer-1"
_HANGS_AT = 3
"""Number of the call in the process: the second step's first, of two steps at least."""
_CALLS_BEFORE_SAVE = 4
"""Of the two steps before the first checkpoint."""


@dataclass(slots=True)
class _Process:
    """This process, since its first call."""

    log: Path
    is_armed: bool
    is_resumed: bool
    num_calls: int = 0

    @classmethod
    def begun(cls) -> "_Process":
        log = Path(os.environ[VARIABLE])
        is_resumed = (log.parents[1] / "checkpoints" / "2").exists()
        return cls(log, log.stem == _RANK and log.with_suffix(".armed").exists(), is_resumed)


_process: _Process | None = None


def hanging_loss(inputs: LossInputs, settings: ClippedSurrogate) -> TokenLosses:
    """`clipped_surrogate`, unless it is time to hang. The second time, a checkpoint is there to begin from."""
    global _process
    _process = this = _process or _Process.begun()
    this.num_calls += 1
    if this.is_armed:
        looped, frozen = this.log.with_suffix(".looped"), this.log.with_suffix(".frozen")
        after_save = _HANGS_AT + (0 if this.is_resumed else _CALLS_BEFORE_SAVE)
        if not looped.exists() and this.num_calls == _HANGS_AT:
            looped.touch()
            loop_for_ever()
        if looped.exists() and not frozen.exists() and this.num_calls == after_save:
            frozen.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
    return clipped_surrogate(inputs, settings)


def loop_for_ever() -> None:
    """Never returns."""
    while True:
        pass
