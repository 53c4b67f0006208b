"""Memory of a supervised warm start: of a device, and of the host of a node. Pure.

The node of the host's table has the controller, and a trainer rank on each device, or all ranks if there are fewer.
"""

from collections.abc import Sequence
from dataclasses import replace

from launcher.cluster.node import NodeResources
from launcher.config.schema import SftConfig
from launcher.estimate.device_memory import UPDATE, contexts, num_communicators, trainer_items, with_reserve
from launcher.estimate.host_memory import (
    CONTROLLER_BYTES,
    GPU_PROCESS_BYTES,
    RAY_BYTES,
    largest_state,
    pinned_bytes,
)
from launcher.estimate.tables import MemoryTable
from launcher.estimate.trainer_kernels import trainer_kernels
from megatron_rl.config import TrainerConfig
from megatron_rl.memory import TRAINER_PROCESS_BYTES, MemoryItem, num_parameters, trainer_rank
from megatron_rl.model.spec import ModelSpec


def sft_tables(
    config: SftConfig, spec: ModelSpec, node: NodeResources, *, flash_attention: str = ""
) -> tuple[MemoryTable, ...]:
    """The tables of a warm start on nodes like `node`, with this version of `flash-attn`; empty without it."""
    kernels = trainer_kernels(config.trainer, node, flash_attention=flash_attention)
    items = trainer_rank(spec, config.trainer, longest_sample=config.data.max_tokens, kernels=kernels)
    if not node.gpu_bytes:
        return (_cpu_table(config.trainer, items, node),)
    return (_device_table(config.trainer, items, node), _host_table(config, spec, node))


def _device_table(trainer: TrainerConfig, items: Sequence[MemoryItem], node: NodeResources) -> MemoryTable:
    processes = contexts(1, num_communicators(trainer.parallel))
    return MemoryTable(
        kind="device",
        load="a trainer rank",
        count=trainer.parallel.world_size,
        phases={
            phase: with_reserve([*trainer_items(items, trainer, phase), processes])
            for phase in ("train", *((UPDATE,) if trainer.optimizer.states_on_host else ()))
        },
        available_bytes=min(node.gpu_bytes),
    )


def _host_table(config: SftConfig, spec: ModelSpec, node: NodeResources) -> MemoryTable:
    trainer, store = config.trainer, config.cluster.object_store_bytes
    ranks = min(trainer.parallel.world_size, len(node.gpu_bytes))
    pinned = ranks * pinned_bytes(largest_state(spec, trainer).optimizer) if trainer.optimizer.states_on_host else 0
    items = [
        MemoryItem(
            what="trainer processes",
            num_bytes=ranks * (TRAINER_PROCESS_BYTES + GPU_PROCESS_BYTES),
            knob="trainer.parallel.data",
        ),
        MemoryItem(what="Ray", num_bytes=RAY_BYTES, knob=""),
        MemoryItem(what="object store", num_bytes=store, knob="cluster.object_store_bytes"),
        MemoryItem(what="controller", num_bytes=CONTROLLER_BYTES, knob=""),
        MemoryItem(what="pinned offload", num_bytes=pinned, knob="trainer.optimizer.states_on_host"),
        MemoryItem(what="page cache", num_bytes=2 * num_parameters(spec), knob=""),
    ]
    return MemoryTable(
        kind="host",
        load="controller + trainer",
        count=1,
        phases={"all phases": tuple(item for item in items if item.num_bytes)},
        available_bytes=node.available_bytes,
        reclaimable=("page cache",),
    )


def _cpu_table(trainer: TrainerConfig, items: Sequence[MemoryItem], node: NodeResources) -> MemoryTable:
    world = trainer.parallel.world_size
    processes = MemoryItem(
        what="trainer processes", num_bytes=world * TRAINER_PROCESS_BYTES, knob="trainer.parallel.data"
    )
    of_ranks = [replace(item, what=f"trainer {item.what}", num_bytes=world * item.num_bytes) for item in items]
    return MemoryTable(
        kind="host",
        load="trainer",
        count=1,
        phases={"train": (*of_ranks, processes)},
        available_bytes=node.available_bytes,
    )
