"""Adds up what the processes of a run will hold on this node, and says whether it fits.

On CPU everything shares the node's memory; with GPUs the bound is the fullest device, which a trainer rank and engine
ranks may share. The arithmetic per rank is `megatron_rl.memory`'s.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from history.store import RESPONSE_BYTES
from launcher.config import RunConfig, SftConfig
from launcher.environment import NodeResources
from megatron_rl.memory import (
    ENGINE_PROCESS_BYTES,
    TRAINER_PROCESS_BYTES,
    MemoryItem,
    engine_rank,
    trainer_rank,
    weight_bytes,
)
from megatron_rl.model_config import ModelSpec
from rollout.weight_format import WeightFormat

SEGMENT_TOKEN_BYTES = 8
"""A token and its place in the sorted order."""

HISTORY_PROCESS_BYTES = 200 << 20
"""Resident memory of a shard or a reader that holds nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What will be used and what there is, of the node (CPU) or of its fullest device."""

    items: tuple[MemoryItem, ...]
    available_bytes: int
    where: str

    @property
    def total_bytes(self) -> int:
        """Sum of the items."""
        return sum(item.num_bytes for item in self.items)

    def lines(self) -> list[str]:
        """One line per item, and the sum against what is available."""
        width = max(len(item.what) for item in self.items)
        body = [f"{item.what:{width}}  {gib(item.num_bytes)}" for item in self.items]
        return [
            *body,
            f"{'sum':{width}}  {gib(self.total_bytes)} of {gib(self.available_bytes)} available ({self.where})",
        ]

    def problems(self) -> list[str]:
        """One sentence if it does not fit, naming the knobs of the largest items."""
        if self.total_bytes <= self.available_bytes:
            return []
        largest = sorted(self.items, key=lambda item: -item.num_bytes)[:2]
        advice = " or ".join(f"`{item.knob}` ({item.what}: {gib(item.num_bytes)})" for item in largest)
        return [
            f"about {gib(self.total_bytes)} would be needed, but {gib(self.available_bytes)} are available "
            f"({self.where}); the largest parts: change {advice}"
        ]


def gib(num_bytes: int) -> str:
    """`num_bytes` for people."""
    return f"{num_bytes / (1 << 30):.2f} GiB"


def run_memory(config: RunConfig, spec: ModelSpec, node: NodeResources) -> MemoryPlan:
    """The plan of a reinforcement-learning run."""
    longest = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    trainer = trainer_rank(spec, config.trainer, longest_sample=longest)
    engine = engine_rank(
        spec,
        weight_format=WeightFormat.of(config.engine),
        tensor_parallel=config.engine.tensor_parallel,
        kv_cache_bytes=config.engine.kv_cache_bytes,
    )
    world, ranks = config.trainer.parallel.world_size, config.engine.num_engines * config.engine.tensor_parallel
    if node.gpu_bytes:
        on_device = -(-ranks // len(node.gpu_bytes))
        trains, samples = tuple(_times(trainer, 1, "trainer")), tuple(_times(engine, on_device, "engine"))
        items = (*trains, *samples)
        if config.publish.transport == "nccl":  # on devices of their own
            items = max(trains, samples, key=lambda side: sum(item.num_bytes for item in side))
        return MemoryPlan(items=items, available_bytes=min(node.gpu_bytes), where="the smallest GPU")
    engine_processes = ENGINE_PROCESS_BYTES * (config.engine.num_engines + ranks) // 2
    items = (
        *_times(trainer, world, "trainer"),
        _item("trainer processes", world * TRAINER_PROCESS_BYTES, "trainer.parallel.data"),
        *_times(engine, ranks, "engine"),
        _item("engine processes", engine_processes, "engine.num_engines"),
        _item("weights on their way", weight_bytes(spec, WeightFormat.of(config.engine)), "engine.format"),
        *(_baselines(config, spec) if config.publish.delta else []),
        _item("object store", config.cluster.object_store_bytes, "cluster.object_store_bytes"),
        *(_history(config) if config.drafts else []),
    )
    return MemoryPlan(items=items, available_bytes=node.available_bytes, where="this node, now")


def _baselines(config: RunConfig, spec: ModelSpec) -> list[MemoryItem]:
    """What trainer and engines keep to send and to take changes only."""
    copies = 1 + config.engine.num_engines
    return [_item("publish baselines", copies * weight_bytes(spec, WeightFormat.of(config.engine)), "publish.delta")]


def _history(config: RunConfig) -> list[MemoryItem]:
    """At most the budget, or all that a short run can say; segments of the step that runs and of the next one."""
    num_responses = config.algorithm.prompts_per_step * config.algorithm.group_size
    step_tokens = num_responses * config.sampling.max_response_tokens
    said = config.num_steps * (4 * step_tokens + RESPONSE_BYTES * num_responses)
    segments = 2 * SEGMENT_TOKEN_BYTES * step_tokens * config.history.kept_steps
    actors = (config.history.num_shards + 1) * HISTORY_PROCESS_BYTES
    return [
        _item("history", min(said, config.history.budget_bytes), "history.budget_bytes"),
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


def _times(items: Iterable[MemoryItem], count: int, who: str) -> list[MemoryItem]:
    return [replace(item, what=f"{who} {item.what}", num_bytes=count * item.num_bytes) for item in items]


def _item(what: str, num_bytes: int, knob: str) -> MemoryItem:
    return MemoryItem(what=what, num_bytes=num_bytes, knob=knob)
