"""Trainer ranks and their coordinates in tensor, data and pipeline parallelism.

Invariant: the order is Megatron's own (`tp-cp-ep-dp-pp`): tensor fastest, then data, then pipeline.
"""

from dataclasses import dataclass

from megatron_rl.config import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRank:
    """Coordinates and resources of one trainer rank."""

    rank: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    cpu_threads: int
    """Threads of matrix products; CPU only."""
    num_gpus: float
    """Fraction of a device; 0 on CPU."""
    node: str = ""
    """Name of its node; empty on the only node of a run."""
    devices: tuple[int, ...] = ()
    """Number of the rank's device on its node; empty on CPU."""


def trainer_ranks(parallel: ParallelConfig, cpu_threads: int, num_gpus: float = 0.0) -> tuple[TrainerRank, ...]:
    """Trainer ranks in Megatron's default order, without a node: tensor fastest, then data, then pipeline."""
    return tuple(
        TrainerRank(
            rank=rank,
            tensor_rank=rank % parallel.tensor,
            data_rank=rank // parallel.tensor % parallel.data,
            pipeline_rank=rank // (parallel.tensor * parallel.data),
            cpu_threads=cpu_threads,
            num_gpus=num_gpus,
        )
        for rank in range(parallel.world_size)
    )
