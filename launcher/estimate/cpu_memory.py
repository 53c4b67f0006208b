"""Memory of a node without GPUs, on which all processes of the run share the host. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from launcher.estimate.host_memory import checkpoint_copies, history_items, reference_copies
from launcher.estimate.loads import NodeLoad
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.tables import MemoryTable
from megatron_rl.memory import (
    ENGINE_PROCESS_BYTES,
    TRAINER_PROCESS_BYTES,
    MemoryItem,
    engine_rank,
)


def cpu_table(run: PlannedRun, load: NodeLoad, *, count: int, available_bytes: int) -> MemoryTable:
    """The table of `count` nodes that hold `load`; nothing is freed between phases."""
    config = run.config
    trainer = run.trainer_rank
    engine = engine_rank(run.spec, config.engine, draft_tokens=run.draft_tokens)
    engine_processes = ENGINE_PROCESS_BYTES * (load.num_engines + load.num_engine_ranks) // 2
    # a copy for the trainer, to find changes, and one in each engine, to apply them
    baselines = (bool(load.num_trainers) + load.num_engines) * run.publish_bytes
    items = (
        *_times(trainer, load.num_trainers, "trainer"),
        *reference_copies(run, load, pinned=False),
        *checkpoint_copies(run, load),
        _item("trainer processes", load.num_trainers * TRAINER_PROCESS_BYTES, "trainer.parallel.data"),
        *_times(engine, load.num_engine_ranks, "engine"),
        _item("engine processes", engine_processes, "engine.num_engines"),
        _item("weights in transit", run.publish_bytes, "engine.format"),
        *([_item("publish baselines", baselines, "publish.delta")] if run.sends_deltas else []),
        _item("object store", config.cluster.object_store_bytes, "cluster.object_store_bytes"),
        *history_items(run, load),
    )
    return MemoryTable(
        kind="host",
        load=load.title,
        count=count,
        phases={"all phases": tuple(item for item in items if item.num_bytes)},
        available_bytes=available_bytes,
    )


def _times(items: Iterable[MemoryItem], count: int, role: str) -> list[MemoryItem]:
    return [replace(item, what=f"{role} {item.what}", num_bytes=count * item.num_bytes) for item in items]


def _item(what: str, num_bytes: int, knob: str) -> MemoryItem:
    return MemoryItem(what=what, num_bytes=num_bytes, knob=knob)
