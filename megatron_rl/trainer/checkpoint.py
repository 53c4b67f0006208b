"""Saves and restores the trainer by Megatron's distributed checkpointing.

Parameters, FP32 master weights and Adam's moments are sharded tensors with global shapes, so a run can resume under
another tensor, pipeline or data partition. Generator states belong to ranks: they are restored only under the partition
that saved them. Training does not draw from them, because dropout is 0.

FP8 parameters are saved as BF16 values and quantised on load. No value changes: a block whose largest code is 224 may
come back with doubled codes and half the scale. The next update quantises the master weights in either case.

The folder is complete when `save` returns on every rank. The run directory then declares it the latest checkpoint.
"""

import queue
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_rl.quantization.fp8_parameters import decoded, is_fp8_parameter
from megatron_rl.trainer.learner import Learner
from megatron_rl.trainer.optimizer import loadable

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Layout of the optimizer on disk, independent of the partition."""


def save(path: Path, learner: Learner) -> None:
    """Write below the empty or missing directory `path`; a collective."""
    path.mkdir(parents=True, exist_ok=True)
    _gather_results_here()
    state = _sharded_state(learner, is_loading=False)
    state["generators"] = _generators()
    dist_checkpointing.save(state, str(path), content_metadata=METADATA)


def _gather_results_here() -> None:
    """Let Megatron's writers report to this process, which waits for them.

    Otherwise Megatron starts a process for background saves, which takes seconds.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def load(path: Path, learner: Learner) -> None:
    """Restore what `save` wrote; a collective.

    Raises:
        ValueError: the directory holds no checkpoint, or expert parallelism was on when saved and is off now, or the
            reverse: Megatron keeps a separate optimizer for spread experts.
    """
    if not (path / "metadata.json").exists():
        raise ValueError(f"{path} holds no trainer checkpoint; resume from a directory that `save` completed")
    common = dist_checkpointing.load_common_state_dict(str(path))
    saved, spread = common.get("spread_experts", False), _spread_experts()
    if saved != spread:
        raise ValueError(
            f"{path} was saved with trainer.parallel.expert {'above' if saved else '='} 1, but it is "
            f"{'above 1' if spread else '1'} now; set it {'above' if saved else 'to'} 1"
        )
    same_partition = common["partition"] == _partition()
    with loadable(learner.optimizer):
        state = _sharded_state(learner, is_loading=True)
        if same_partition:
            state["generators"] = _generators()
        restored = dist_checkpointing.load(state, str(path))
        for chunk in learner.chunks:
            chunk.module.load_state_dict(restored["model"], strict=True)
        learner.optimizer.load_state_dict(restored["optimizer"])
    learner.schedule.load_state_dict(restored["schedule"])
    if same_partition:
        _restore_generators(restored["generators"])


def _spread_experts() -> bool:
    return int(parallel_state.get_expert_model_parallel_world_size()) > 1


def _sharded_state(learner: Learner, *, is_loading: bool) -> dict[str, object]:
    (chunk,) = learner.chunks
    model = chunk.module.sharded_state_dict()
    optimizer = learner.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
    _decode(model)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": learner.schedule.state_dict(),
        "partition": _partition(),
        "spread_experts": _spread_experts(),
    }


def _decode(model: dict[str, object]) -> None:
    """Replace FP8 parameters by BF16 tensors on the CPU.

    Megatron does so on load (`force_all_tensors_to_non_fp8`, on the device) but not on save. Call it after the
    optimizer's state is built, because that finds its parameters by identity.
    """
    for entry in nested_values(model):
        if is_fp8_parameter(data := getattr(entry, "data", None)):
            entry.data = decoded(data).cpu()


def _partition() -> tuple[int, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )


def _generators() -> ShardedObject:
    """This rank's generator states, one object per (pipeline, tensor, data) coordinate."""
    tensor, pipeline, data = _partition()
    states = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0, dtype=torch.uint8),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    offset = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    return ShardedObject("generators", states, (pipeline, tensor, data), offset, replica_id=0)


def _restore_generators(states: dict[str, object]) -> None:
    cpu, cuda, megatron = states["torch"], states["cuda"], states["megatron"]
    assert isinstance(cpu, torch.Tensor) and isinstance(cuda, torch.Tensor)
    torch.set_rng_state(cpu)
    if torch.cuda.is_available() and len(cuda):
        torch.cuda.set_rng_state(cuda)
    tensor_parallel.get_cuda_rng_tracker().set_states(megatron)
