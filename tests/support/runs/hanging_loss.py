"""The built-in loss, in which trainer rank 1 of a run hangs once in an endless loop.

Only a process hangs that begins once `trainer-1.armed` is among the run's logs, so that another fault can come first.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.algorithm.columns import LossInputs, TokenLosses
from megatron_rl.algorithm.losses import clipped_surrogate
from megatron_rl.algorithm_settings import ClippedSurrogate
from rollout.processes import VARIABLE

_RANK = "trainer-1"
_HANGS_AT = 3
"""Number of the call in the process: the second step's first, of two steps at least."""


@dataclass(slots=True)
class _Process:
    """This process, since its first call."""

    log: Path
    is_armed: bool
    num_calls: int = 0

    @classmethod
    def begun(cls) -> "_Process":
        log = Path(os.environ[VARIABLE])
        return cls(log, log.stem == _RANK and log.with_suffix(".armed").exists())


_process: _Process | None = None


def hanging_loss(inputs: LossInputs, settings: ClippedSurrogate) -> TokenLosses:
    """`clipped_surrogate`, unless it is time to hang."""
    global _process
    _process = this = _process or _Process.begun()
    this.num_calls += 1
    looped = this.log.with_suffix(".looped")
    if this.is_armed and this.num_calls == _HANGS_AT and not looped.exists():
        looped.touch()
        loop_for_ever()
    return clipped_surrogate(inputs, settings)


def loop_for_ever() -> None:
    """Never returns."""
    while True:
        pass
