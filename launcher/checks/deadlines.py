"""Refuses time limits that would end a healthy trainer, and warns of those that never act."""

from launcher.cluster.node import NodeResources
from megatron_rl.config import TrainerConfig

SHORTEST_ON_GPUS_S = 60.0
"""Shortest plausible `trainer.progress_timeout_s` on GPUs, whose first micro batch compiles kernels."""


def deadline_problems(trainer: TrainerConfig, node: NodeResources) -> list[str]:
    """Time limits that a healthy trainer on this machine would miss."""
    if node.gpu_bytes and trainer.progress_timeout_s < SHORTEST_ON_GPUS_S:
        return [
            f"`trainer.progress_timeout_s` = {trainer.progress_timeout_s:g}: the first micro batch on a GPU compiles "
            f"kernels, and the trainer would be ended meanwhile; set it to {SHORTEST_ON_GPUS_S:g} or more"
        ]
    return []


def deadline_warnings(trainer: TrainerConfig) -> list[str]:
    """Time limits without an effect."""
    if trainer.progress_timeout_s > trainer.timeout_s:
        return [
            f"`trainer.progress_timeout_s` = {trainer.progress_timeout_s:g} has no effect, because "
            f"`trainer.timeout_s` = {trainer.timeout_s:g} ends a call before; lower it to find a hang by its progress"
        ]
    return []
