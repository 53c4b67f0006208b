"""Refuses time limits that would end a healthy trainer, and warns of those that never act or are near an estimate."""

import math

from launcher.cluster.node import NodeResources
from launcher.cluster.slurm_script import DEFAULT_STOP_S, MIN_STOP_S
from launcher.config.schema import RunConfig
from megatron_rl.config import TrainerConfig

SHORTEST_ON_GPUS_S = 60.0
"""Shortest plausible `trainer.progress_timeout_s` on GPUs, whose first micro batch compiles kernels."""
_MARGIN = 2.0
"""By which a limit shall exceed the estimated time of training: estimates are rough, and answers grow in training."""


def deadline_problems(trainer: TrainerConfig, node: NodeResources) -> list[str]:
    """Time limits that a healthy trainer on this machine would miss."""
    if node.gpu_bytes and trainer.progress_timeout_s < SHORTEST_ON_GPUS_S:
        return [
            f"`trainer.progress_timeout_s` = {trainer.progress_timeout_s:g}: the first micro batch on a GPU compiles "
            f"kernels, and the trainer would be ended meanwhile; set it to {SHORTEST_ON_GPUS_S:g} or more"
        ]
    return []


def deadline_warnings(config: RunConfig) -> list[str]:
    """Time limits without an effect, because a shorter one acts before."""
    trainer, update_s = config.trainer, config.engine.update_timeout_s
    warnings = []
    if config.publish.timeout_s > update_s:
        warnings.append(
            f"`publish.timeout_s` = {config.publish.timeout_s:g} has no effect, because an engine gives up an update "
            f"after `engine.update_timeout_s` = {update_s:g}; raise that too"
        )
    if trainer.progress_timeout_s > trainer.timeout_s:
        warnings.append(
            f"`trainer.progress_timeout_s` = {trainer.progress_timeout_s:g} has no effect, because "
            f"`trainer.timeout_s` = {trainer.timeout_s:g} ends a call before; lower it to find a hang by its progress"
        )
    return warnings


def warnings_of_estimate(config: RunConfig, train_s: float) -> list[str]:
    """Time limits that a step may exceed in good health; `train_s` is the estimate of one step's training."""
    warnings = []
    if config.trainer.timeout_s < _MARGIN * train_s:
        warnings.append(
            f"`trainer.timeout_s` = {config.trainer.timeout_s:g} ends a trainer whose training takes longer, and the "
            f"estimate is {train_s:.0f} s; set it to {_rounded_up(_MARGIN * train_s)} or more"
        )
    stop_before_s = config.cluster.slurm.stop_before_s
    if (stop_before_s or DEFAULT_STOP_S) < train_s + MIN_STOP_S:
        warnings.append(
            f"`cluster.slurm.stop_before_s` = {stop_before_s}: a job of a new run is asked to stop "
            f"{stop_before_s or DEFAULT_STOP_S} s before its time limit. A stop waits for training, whose estimate is "
            f"{train_s:.0f} s, and for a save; set it to {_rounded_up(_MARGIN * train_s)} or more"
        )
    return warnings


def _rounded_up(seconds: float) -> int:
    return 300 * math.ceil(seconds / 300)
