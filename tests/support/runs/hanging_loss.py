"""The built-in loss, in which trainer rank 1 of a run hangs twice: in an endless loop, and, after a restart, frozen."""

import os
import signal
from pathlib import Path

from megatron_rl.algorithm.columns import LossInputs, TokenLosses
from megatron_rl.algorithm.losses import clipped_surrogate
from megatron_rl.algorithm_settings import ClippedSurrogate
from rollout.processes import VARIABLE

LOOPS_AT, FREEZES_AT = 3, 7
"""Number of the call, in the process, at which it happens."""

_num_calls = 0


def hanging_loss(inputs: LossInputs, settings: ClippedSurrogate) -> TokenLosses:
    """`clipped_surrogate`, unless it is time to hang."""
    global _num_calls
    _num_calls += 1
    log = Path(os.environ[VARIABLE])
    looped, frozen = log.with_suffix(".looped"), log.with_suffix(".frozen")
    if log.stem == "trainer-1" and _num_calls == LOOPS_AT and not looped.exists():
        looped.touch()
        loop_for_ever()
    if log.stem == "trainer-1" and _num_calls == FREEZES_AT and not frozen.exists():
        frozen.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return clipped_surrogate(inputs, settings)


def loop_for_ever() -> None:
    """Never returns."""
    while True:
        pass
