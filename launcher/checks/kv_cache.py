"""Sizes the KV cache by what the memory plan leaves of the GPUs (`engine.gpu_memory_fraction`). Pure.

The tables of `launcher.estimate` say what trainer and engines need beside keys and values, in every phase of a step.
The cache takes the rest of the fullest phase in which it exists. So two engines on a device, a trainer beside an
engine, and sleeping engines are all counted.
"""

from collections.abc import Sequence
from dataclasses import replace

from launcher.cluster.node import NodeResources
from launcher.config.schema import RunConfig
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.run_tables import run_tables

GRAIN_BYTES = 64 << 20
"""The size is a multiple of this."""


def sized(run: PlannedRun, nodes: Sequence[NodeResources]) -> PlannedRun:
    """The run with `engine.kv_cache_bytes` in the place of `engine.gpu_memory_fraction`; unchanged without the latter.

    If nothing is left, the cache has `GRAIN_BYTES`, and the memory plan refuses the run.
    """
    fraction = run.config.engine.gpu_memory_fraction
    if fraction is None:
        return run
    low, high = 1, max(max(node.gpu_bytes, default=0) for node in nodes) // GRAIN_BYTES
    while low < high:  # tables grow with the cache, so the largest size that fits is found by halving
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(_with_cache(run, middle), nodes, fraction) else (low, middle - 1)
    return _with_cache(run, low)


def _with_cache(run: PlannedRun, grains: int) -> PlannedRun:
    engine = run.config.engine.model_copy(update={"kv_cache_bytes": grains * GRAIN_BYTES, "gpu_memory_fraction": None})
    return replace(run, config=run.config.model_copy(update={"engine": engine}))


def _fits(run: PlannedRun, nodes: Sequence[NodeResources], fraction: float) -> bool:
    devices = [table for table in run_tables(run, nodes) if table.kind == "device"]
    return all(table.needed_bytes <= fraction * table.available_bytes for table in devices)


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
