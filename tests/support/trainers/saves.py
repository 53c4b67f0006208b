"""Whole saves of a trainer, as today's version writes them and as earlier ones did."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.trainer.trainer import Trainer


def save(trainer: "Trainer", path: str) -> None:
    """Save from copies and wait."""
    trainer.begin_save(path, background=True)
    trainer.finish_save()


def save_as_earlier_versions(trainer: "Trainer", path: str) -> None:
    """Save what earlier versions saved: Megatron's gathered optimizer, and states of generators as a pickled object.

    Forks wrote the files then; forks inside a test are fragile, and the files are the same.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from megatron_rl.checkpoints.writer import CheckpointWriter

    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    learner = trainer._policy
    (chunk,) = learner.chunks
    model = chunk.module.sharded_state_dict()
    partition = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    generators = {
        "torch": torch.get_rng_state(),
        "cuda": torch.empty(0, dtype=torch.uint8),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    tensor, pipeline, data = partition
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    state = {
        "model": model,
        "optimizer": learner.optimizer.sharded_state_dict(model, is_loading=False, metadata=metadata),
        "schedule": learner.schedule.state_dict(),
        "partition": partition,
        "spread_experts": parallel_state.get_expert_model_parallel_world_size() > 1,
        "generators": ShardedObject("generators", generators, (pipeline, tensor, data), place, replica_id=0),
    }
    Path(path).mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter()
    writer.begin(state, Path(path), background=False)
    writer.finish()
