"""Sizes the KV cache by what the memory plan leaves of the GPUs (`engine.gpu_memory_fraction`). Pure.

The tables of `launcher.estimate` say what trainer and engines need beside keys and values, in every phase of a step.
The cache takes the rest of the fullest phase in which it exists. So two engines on a device, a trainer beside an
engine, and sleeping engines are all counted. Other phases may fill the whole device.

The BF16 engines of `evaluation.bf16_before_after` have devices to themselves, but larger weights than the run's
engines. So their cache may have to be smaller.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from launcher.checks.model import engine_problems, response_lengths
from launcher.cluster.node import NodeResources
from launcher.cluster.placement import plan_evaluation
from launcher.config.schema import RunConfig
from launcher.estimate.device_memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, engine_items, with_reserve
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.run_tables import run_tables
from launcher.estimate.tables import MemoryTable, gib
from megatron_rl.memory import MemoryItem, engine_rank
from megatron_rl.model.spec import ModelSpec
from rollout.config import EngineConfig

GRAIN_BYTES = 64 << 20
"""The size is a multiple of this."""
CACHE = "engine keys and values"
"""The item of the tables."""


def sized(run: PlannedRun, nodes: Sequence[NodeResources]) -> PlannedRun:
    """The run with `engine.kv_cache_bytes` in the place of `engine.gpu_memory_fraction`; unchanged without the latter.

    If nothing is left, the cache has `GRAIN_BYTES`, and `fraction_problems` or the memory plan refuses the run.
    """
    fraction = run.config.engine.gpu_memory_fraction
    if fraction is None:
        return run
    low, high = 1, max(max(node.gpu_bytes, default=0) for node in nodes) // GRAIN_BYTES
    while low < high:  # tables grow with the cache, so the largest size that fits is found by halving
        middle = (low + high + 1) // 2
        fits = not _overfull(_with_cache(run, middle), nodes, fraction)
        low, high = (middle, high) if fits else (low, middle - 1)
    return _with_cache(run, low)


def fraction_problems(run: PlannedRun, nodes: Sequence[NodeResources]) -> list[str]:
    """Why `engine.gpu_memory_fraction` leaves no room for keys and values; `run` has the fraction.

    Devices that are too small for a phase are left to the memory plan, whose refusal names what to change.
    """
    fraction = run.config.engine.gpu_memory_fraction
    if fraction is None:
        return []
    problems = []
    for table, phase in _overfull(_with_cache(run, 1), nodes, fraction):
        needed, available = table.total_bytes(phase), table.available_bytes
        if needed <= available:
            problems.append(
                f"`engine.gpu_memory_fraction` = {fraction:g} leaves nothing to the KV cache: a {table.title} needs "
                f"{gib(needed)} of {gib(available)} in `{phase}` with the smallest cache; raise the fraction to "
                f"{math.ceil(100 * needed / available) / 100:g} or more, or change {_largest_knob(table, phase)}"
            )
    return problems


def has_room(run: PlannedRun, nodes: Sequence[NodeResources]) -> bool:
    """Whether all devices hold the smallest cache; otherwise no `engine.gpu_memory_fraction` gives it a size."""
    return not _overfull(_with_cache(run, 1), nodes, 1.0)


def _largest_knob(table: MemoryTable, phase: str) -> str:
    """The key that shrinks the largest item beside keys and values."""
    items = [item for item in table.phases[phase] if item.knob and item.what != CACHE]
    largest = max(items, key=lambda item: item.num_bytes)
    return f"`{largest.knob}` ({largest.what}: {gib(largest.num_bytes)})"


def _with_cache(run: PlannedRun, grains: int) -> PlannedRun:
    engine = run.config.engine.model_copy(update={"kv_cache_bytes": grains * GRAIN_BYTES, "gpu_memory_fraction": None})
    return replace(run, config=run.config.model_copy(update={"engine": engine}))


def _overfull(run: PlannedRun, nodes: Sequence[NodeResources], fraction: float) -> list[tuple[MemoryTable, str]]:
    """Each kind of device above the fraction, with its fullest phase out of those with keys and values."""
    overfull = []
    for table in run_tables(run, nodes):
        cached = [phase for phase, items in table.phases.items() if any(item.what == CACHE for item in items)]
        if table.kind == "device" and cached:
            fullest = max(cached, key=table.total_bytes)
            if table.total_bytes(fullest) > fraction * table.available_bytes:
                overfull.append((table, fullest))
    return overfull


def evaluation_engine(config: RunConfig, spec: ModelSpec, nodes: Sequence[NodeResources]) -> EngineConfig:
    """The engines of `evaluation.bf16_before_after`: the run's in BF16, with as much of its KV cache as fits.

    Args:
        config: of the run, with the size of the cache.
        spec: architecture of the model.
        nodes: all nodes of the run, which the trainer has left.

    Raises:
        ConfigError: such engines cannot be placed.
    """
    engine = config.engine.model_copy(update={"format": "bf16", "kv_format": "bf16", "sleep_level": 0})
    sizes = [size for node in nodes for size in node.gpu_bytes]
    if not sizes:
        return engine
    slots = plan_evaluation(engine, nodes)
    ranks = max(Counter((slot.node, device) for slot in slots for device in slot.devices).values(), default=1)
    contexts = ranks * (CONTEXT_BYTES + (engine.tensor_parallel > 1) * COMMUNICATOR_BYTES)

    def fits(kv_cache_bytes: int) -> bool:
        items = engine_rank(spec, engine.model_copy(update={"kv_cache_bytes": kv_cache_bytes}), on_gpu=True)
        other = MemoryItem(what="contexts and NCCL", num_bytes=contexts, knob="")
        needed = with_reserve([*engine_items(items, engine, "rollout", ranks), other])
        return sum(item.num_bytes for item in needed) <= min(sizes)

    if fits(engine.kv_cache_bytes):
        return engine
    low, high = 1, engine.kv_cache_bytes // GRAIN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * GRAIN_BYTES) else (low, middle - 1)
    return engine.model_copy(update={"kv_cache_bytes": low * GRAIN_BYTES})


def evaluation_problems(config: RunConfig, spec: ModelSpec, nodes: Sequence[NodeResources]) -> list[str]:
    """Why the weights before and after the run could not be evaluated in BF16; known before the run begins."""
    if not config.evaluation.sets or not config.evaluation.bf16_before_after:
        return []
    engine = evaluation_engine(config, spec, nodes)
    if engine.kv_cache_bytes >= config.engine.kv_cache_bytes:
        return []
    lengths = response_lengths(config.evaluation.sets, "evaluation.sets")
    return [
        f"`evaluation.bf16_before_after` = true: BF16 weights leave {engine.kv_cache_bytes >> 20} MiB of each device "
        f"to the KV cache. {problem.partition('; ')[0]}; set bf16_before_after to false"
        for problem in engine_problems(spec, engine, config.data.max_prompt_tokens, lengths)
    ]


def cache_problems(config: RunConfig, node: NodeResources) -> list[str]:
    """Problems of the two keys that size the cache; `node` says which devices there are."""
    fraction = config.engine.gpu_memory_fraction
    if fraction is None:
        return []
    problems = []
    if "kv_cache_bytes" in config.engine.model_fields_set:
        problems.append(
            f"`engine.gpu_memory_fraction` = {fraction:g} with `engine.kv_cache_bytes` = "
            f"{config.engine.kv_cache_bytes}: both size the KV cache; remove one of them"
        )
    if not node.gpu_bytes:
        problems.append(
            f"`engine.gpu_memory_fraction` = {fraction:g}: this machine has no GPU; set `engine.kv_cache_bytes` instead"
        )
    return problems
