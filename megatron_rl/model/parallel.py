"""Process groups of the trainer (torch.distributed and Megatron) and the coordinates of this rank.

Ranks are numbered tensor-parallel first, then data, then pipeline (Megatron's order tp-dp-pp), so tensor-parallel ranks
are neighbours. The backend is NCCL on CUDA, else gloo.

Megatron's functions are called with keywords, because argument lists differ between its versions.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import Store, TCPStore

from megatron_rl.config import ParallelConfig
from rollout.failures import UnusableDeviceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Coordinates of one trainer rank in the partition."""

    rank: int
    tensor: int
    """Rank within its tensor-parallel group."""
    pipeline: int
    data: int


def position(parallel: ParallelConfig, rank: int) -> Position:
    """Coordinates of a global rank."""
    outer, tensor = divmod(rank, parallel.tensor)
    pipeline, data = divmod(outer, parallel.data)
    return Position(rank=rank, tensor=tensor, pipeline=pipeline, data=data)


def rank_at(parallel: ParallelConfig, *, tensor: int, pipeline: int, data: int = 0) -> int:
    """Global rank at given coordinates; the inverse of `position`."""
    return tensor + parallel.tensor * (data + parallel.data * pipeline)


def device() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store of rank 0."""
    return TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))


def initialize(
    parallel: ParallelConfig,
    *,
    rank: int,
    store: Store,
    timeout_s: float,
    seed: int,
    devices: str = "",
) -> Position:
    """Join all ranks and create Megatron's groups. Every rank calls it; it returns when all have joined.

    `store` is shared by all ranks (`rollout.transports.rendezvous.open_store` on rank 0, `join_store` on the others).
    `timeout_s` is torch's limit for every collective. torch's clock goes on while this process is stopped, so trainer
    ranks pass `NEVER`, and the controller ends hangs (`megatron_rl.trainer.group`, decision 62). The store has its own
    limit.
    `devices` are those of the rank's placement (`rollout.processes.given_devices`); the rank uses the first one.

    Raises:
        UnusableDeviceError: the rank is placed on a device, and torch can use none.
    """
    on_cuda = torch.cuda.is_available()
    if devices and not on_cuda:
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        raise UnusableDeviceError(
            f"trainer rank {rank} is placed on GPU {devices}, which torch {torch.__version__} cannot use: it is built "
            f"for {built_for}; use the environment of `make setup-cuda`, and a driver for its CUDA (`nvidia-smi` shows "
            "the newest that the driver knows), or set `CUDA_VISIBLE_DEVICES=` to use the CPU on purpose"
        )
    if on_cuda:
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend="nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=parallel.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.tensor,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        order="tp-cp-ep-dp-pp",
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return position(parallel, rank)


def destroy() -> None:
    """Destroy all groups; a later `initialize` may create new ones."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
