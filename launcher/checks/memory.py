"""Estimates the memory of a run's processes on this node and refuses runs that do not fit.

On CPUs all processes share the node's memory. With GPUs the fullest device is the bound; a trainer rank and engine
ranks may share it. `megatron_rl.memory` computes the bytes of a rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from history.store.prompt_store import RESPONSE_BYTES
from launcher.cluster.node import NodeResources
from launcher.config.schema import RunConfig, SftConfig
from megatron_rl.memory import (
    ENGINE_PROCESS_BYTES,
    TRAINER_PROCESS_BYTES,
    MemoryItem,
    engine_rank,
    trainer_rank,
    weight_bytes,
)
from megatron_rl.model.spec import ModelSpec
from rollout.weights.format import WeightFormat

SEGMENT_TOKEN_BYTES = 8
"""Bytes of a token and of its suffix-array entry."""

HISTORY_PROCESS_BYTES = 200 << 20
"""Resident memory of an empty history shard or reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Needed and available memory of the node (CPU) or of its fullest device."""

    items: tuple[MemoryItem, ...]
    available_bytes: int
    where: str
    """Name of the node or device, for people."""

    @property
    def total_bytes(self) -> int:
        """Sum of the items."""
        return sum(item.num_bytes for item in self.items)

    def lines(self) -> list[str]:
        """One line per item, and the sum beside the available memory."""
        width = max(len(item.what) for item in self.items)
        body = [f"{item.what:{width}}  {gib(item.num_bytes)}" for item in self.items]
        return [
            *body,
            f"{'sum':{width}}  {gib(self.total_bytes)} of {gib(self.available_bytes)} available ({self.where})",
        ]

    def problems(self) -> list[str]:
        """One sentence if the plan does not fit, with the keys of the largest items."""
        if self.total_bytes <= self.available_bytes:
            return []
        largest = sorted((item for item in self.items if item.knob), key=lambda item: -item.num_bytes)[:2]
        advice = " or ".join(f"`{item.knob}` ({item.what}: {gib(item.num_bytes)})" for item in largest)
        return [
            f"about {gib(self.total_bytes)} are needed, but {gib(self.available_bytes)} are available "
            f"({self.where}); the largest parts: change {advice}"
        ]


def gib(num_bytes: int) -> str:
    """`num_bytes` as text in GiB."""
    return f"{num_bytes / (1 << 30):.2f} GiB"


def run_memory(config: RunConfig, spec: ModelSpec, format: WeightFormat, node: NodeResources) -> MemoryPlan:
    """The plan of a reinforcement-learning run; `format` is that of the engines' weights."""
    longest = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    trainer = trainer_rank(spec, config.trainer, longest_sample=longest)
    engine = engine_rank(
        spec,
        weight_format=format,
        tensor_parallel=config.engine.tensor_parallel,
        kv_cache_bytes=config.engine.kv_cache_bytes,
    )
    world, ranks = config.trainer.parallel.world_size, config.engine.num_engines * config.engine.tensor_parallel
    if node.gpu_bytes:
        on_device = -(-ranks // len(node.gpu_bytes))
        phases = device_phases(
            config, trainer, [replace(item, num_bytes=on_device * item.num_bytes) for item in engine]
        )
        worst = max(phases, key=lambda phase: sum(item.num_bytes for item in phases[phase]))
        where = f"the smallest GPU, {worst}"
        return MemoryPlan(items=phases[worst], available_bytes=min(node.gpu_bytes), where=where)
    engine_processes = ENGINE_PROCESS_BYTES * (config.engine.num_engines + ranks) // 2
    items = (
        *_times(trainer, world, "trainer"),
        _item("trainer processes", world * TRAINER_PROCESS_BYTES, "trainer.parallel.data"),
        *_times(engine, ranks, "engine"),
        _item("engine processes", engine_processes, "engine.num_engines"),
        _item("weights in transit", weight_bytes(spec, format), "engine.format"),
        *(_baselines(1 + config.engine.num_engines, weight_bytes(spec, format)) if config.publish.delta else []),
        _item("object store", config.cluster.object_store_bytes, "cluster.object_store_bytes"),
        *(_history(config) if config.drafts else []),
    )
    return MemoryPlan(items=items, available_bytes=node.available_bytes, where="this node, now")


CONTEXT_BYTES = 600 << 20
"""Device memory of each process for context, library handles and workspaces; an estimate."""
GRAPH_BYTES = 1 << 30
"""CUDA graphs of one engine rank; an estimate."""
RESERVE = 0.05
"""Share lost to fragmentation; an estimate."""

_STAYS = {"none": ("parameters", "gradients", "optimizer"), "optimizer": ("parameters",), "all": ()}
"""Items of a trainer that stay on its device while engines sample, by `trainer.offload`."""


def device_phases(
    config: RunConfig, trainer: Sequence[MemoryItem], engine: Sequence[MemoryItem]
) -> dict[str, tuple[MemoryItem, ...]]:
    """Memory of one device in each phase; `trainer` and `engine` are the items of the ranks on it.

    While engines sample, `trainer.offload` decides which trainer items stay. While the trainer trains,
    `engine.sleep_level` decides which engine items stay. A publish holds the weights of both sides and the bytes in
    transit.
    """
    disaggregated = config.placement.mode == "disaggregated"
    trains = _times(trainer, 1, "trainer")
    stays = _times([item for item in trainer if item.what in _STAYS[config.trainer.offload]], 1, "trainer")
    left_to_send = ("parameters",) if config.trainer.offload != "none" else _STAYS["none"]
    sends = _times([item for item in trainer if item.what in left_to_send], 1, "trainer")
    samples = [*_times(engine, 1, "engine"), _item("CUDA graphs", GRAPH_BYTES, "engine.vllm")]
    weights = [item for item in engine if item.what == "weights"]
    sleeps = config.engine.sleep_level > 0
    transit = _in_transit(config, sum(item.num_bytes for item in weights))
    if disaggregated:
        phases = {"an engine's device": [*samples, *transit], "a trainer rank's device": [*trains, *transit]}
    else:
        phases = {
            "while engines sample": [*stays, *samples],
            "while the trainer trains": [*trains, *([] if sleeps else samples)],
            "during a publish": [*sends, *(_times(weights, 1, "engine") if sleeps else samples), *transit],
        }
    contexts = _item("CUDA contexts", (1 if disaggregated else 2) * CONTEXT_BYTES, "")
    return {phase: (*items, contexts, _reserve([*items, contexts])) for phase, items in phases.items()}


def _in_transit(config: RunConfig, engine_bytes: int) -> list[MemoryItem]:
    """Memory of a publish on a device whose engine ranks receive `engine_bytes`: a whole staged publish (CUDA IPC), or
    two buckets and the delta baselines (NCCL).
    """
    publish = config.publish
    disaggregated = config.placement.mode == "disaggregated"
    if publish.transport == "cuda_ipc" or (publish.transport == "auto" and not publish.delta and not disaggregated):
        return [_item("weights in transit", engine_bytes, "engine.tensor_parallel")]
    if publish.transport != "nccl" and not (disaggregated and publish.transport == "auto"):
        return []  # through the host
    baselines = [_item("publish baselines", engine_bytes, "publish.delta")] if publish.delta else []
    return [_item("buckets in transit", 2 * publish.bucket_bytes, "publish.bucket_bytes"), *baselines]


def _reserve(items: Sequence[MemoryItem]) -> MemoryItem:
    return _item("reserve", int(RESERVE * sum(item.num_bytes for item in items)), "")


def _baselines(num_copies: int, publish_bytes: int) -> list[MemoryItem]:
    """Buckets of the last publish: a copy in the trainer, to find changes, and one in each engine, to apply them."""
    return [_item("publish baselines", num_copies * publish_bytes, "publish.delta")]


def _history(config: RunConfig) -> list[MemoryItem]:
    """The smaller of the budget and all responses of the run; segments of the current step and of the next one."""
    num_responses = config.algorithm.prompts_per_step * config.algorithm.group_size
    step_tokens = num_responses * config.sampling.max_response_tokens
    run_bytes = config.num_steps * (4 * step_tokens + RESPONSE_BYTES * num_responses)
    segments = 2 * SEGMENT_TOKEN_BYTES * step_tokens * config.history.kept_steps
    actors = (config.history.num_shards + 1) * HISTORY_PROCESS_BYTES
    return [
        _item("history", min(run_bytes, config.history.budget_bytes), "history.budget_bytes"),
        _item("history segments", segments, "sampling.max_response_tokens"),
        _item("history processes", actors, "history.num_shards"),
    ]


def sft_memory(config: SftConfig, spec: ModelSpec, node: NodeResources) -> MemoryPlan:
    """The plan of a supervised warm start."""
    trainer = trainer_rank(spec, config.trainer, longest_sample=config.data.max_tokens)
    if node.gpu_bytes:
        return MemoryPlan(
            items=tuple(_times(trainer, 1, "trainer")), available_bytes=min(node.gpu_bytes), where="the smallest GPU"
        )
    world = config.trainer.parallel.world_size
    items = (
        *_times(trainer, world, "trainer"),
        _item("trainer processes", world * TRAINER_PROCESS_BYTES, "trainer.parallel.data"),
    )
    return MemoryPlan(items=items, available_bytes=node.available_bytes, where="this node, now")


def _times(items: Iterable[MemoryItem], count: int, role: str) -> list[MemoryItem]:
    return [replace(item, what=f"{role} {item.what}", num_bytes=count * item.num_bytes) for item in items]


def _item(what: str, num_bytes: int, knob: str) -> MemoryItem:
    return MemoryItem(what=what, num_bytes=num_bytes, knob=knob)
