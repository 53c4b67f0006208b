"""Refuses runs that do not fit into the memory of the devices or nodes, by the tables of `launcher.estimate`.

A refusal names each table that does not fit, its worst phase, and the changes that free most there, in bytes and sorted
by effect (`launcher.checks.memory_changes`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.checks.memory_changes import changes_of, conflicts, sft_changes_of, sft_conflicts
from launcher.cluster.node import NodeResources
from launcher.cluster.placement import Placement, plan
from launcher.cluster.weight_route import Transport
from launcher.config.schema import RunConfig, SftConfig
from launcher.errors import ConfigError
from launcher.estimate.device_memory import CONTEXT_BYTES
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.run_tables import run_tables
from launcher.estimate.sft_memory import sft_tables
from launcher.estimate.tables import MemoryTable, gib
from megatron_rl.config import TrainerConfig
from megatron_rl.memory import TRAINER_PROCESS_BYTES
from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.state_sizes import rank_state

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables with settings of torch's allocator of device memory."""

RESPONSE_TOKEN_BYTES = 9
"""Of a response token in the object store: its id, its log-probability and a flag."""
_STORE_GRAIN = 256 << 20
MAX_CHANGES = 5
"""Changes that a refusal lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a key, and its effect on a table that does not fit."""

    key: str
    value: str
    freed_bytes: int
    """Bytes that it frees in the worst phase of the tables of the same kind."""
    suffices: bool
    """Whether everything fits after this change alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A table that does not fit."""

    table: MemoryTable
    changes: tuple[Change, ...]
    """The most effective ones first."""

    def __str__(self) -> str:
        table = self.table
        needed = f"{table.title}: about {gib(table.needed_bytes)} are needed in `{table.worst_phase}`"
        has = f"but {table.available_text} are available"
        if self.changes:
            listed = "; ".join(
                f"`{change.key}` = {change.value} frees {gib(change.freed_bytes)}"
                + (" and suffices" if change.suffices else "")
                for change in self.changes[:MAX_CHANGES]
            )
            return f"{needed}, {has}; {listed}"
        items = sorted(
            (item for item in table.phases[table.worst_phase] if item.knob), key=lambda item: -item.num_bytes
        )
        largest = " or ".join(f"`{item.knob}` ({item.what}: {gib(item.num_bytes)})" for item in items[:2])
        return f"{needed}, {has}; the largest parts: change {largest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of every kind of device and node of a run."""

    tables: tuple[MemoryTable, ...]
    shortages: tuple[Shortage, ...]

    def lines(self) -> list[str]:
        """All tables."""
        lines: list[str] = []
        for table in self.tables:
            lines += [*([""] if lines else []), *table.lines()]
        return lines

    def problems(self) -> list[str]:
        """One sentence for each table that does not fit."""
        return [str(shortage) for shortage in self.shortages]


def run_memory(run: PlannedRun, nodes: Sequence[NodeResources]) -> MemoryPlan:
    """The plan of a reinforcement-learning run on `nodes`."""
    tables = run_tables(run, nodes)
    lacking = [table for table in tables if not table.fits]
    changed = _changed_runs(run, nodes) if lacking else {}
    return MemoryPlan(
        tables=tables,
        shortages=tuple(Shortage(table=table, changes=_effects(table, tables, changed)) for table in lacking),
    )


def store_warnings(config: RunConfig, placement: Placement) -> list[str]:
    """Warns of an object store that could not hold the responses of a step in memory, if all had the longest length.

    Engines' nodes hold what their engines sampled until a step later, and what is sampled ahead, with the groups that
    dynamic sampling adds. Trainers' nodes fetch the shares of their replicas, of groups that are trained on.
    """
    algorithm = config.algorithm
    group_bytes = algorithm.group_size * config.sampling.max_response_tokens * RESPONSE_TOKEN_BYTES
    on_engines = {slot.node for slot in placement.serving}
    replicas = {(rank.node, rank.data_rank) for rank in placement.trainers}
    most = 0.0
    for node in {*on_engines, *[node for node, _ in replicas]}:
        steps = (2 + config.planner.overlap) / len(on_engines) if node in on_engines else 0.0
        share = sum(at == node for at, _ in replicas) / config.trainer.parallel.data
        most = max(most, group_bytes * (steps * algorithm.max_groups + share * algorithm.prompts_per_step))
    store = config.cluster.object_store_bytes
    if most <= store:
        return []
    wanted = math.ceil(most / _STORE_GRAIN) * _STORE_GRAIN
    return [
        f"`cluster.object_store_bytes` = {store}: responses of the longest length take {most / 2**20:.0f} MiB of a "
        f"node's store, and Ray writes what does not fit to disk, so that training waits; set it to {wanted}"
    ]


def _changed_runs(run: PlannedRun, nodes: Sequence[NodeResources]) -> dict[tuple[str, str], tuple[MemoryTable, ...]]:
    """Tables after each single change of a key to which no other check objects."""
    tables = {}
    known = conflicts(run.config, run.spec, nodes[0])
    for change in changes_of(run.config):
        if conflicts(change.config, run.spec, nodes[0]) <= known:
            try:
                placement = plan(change.config, nodes)
            except ConfigError:
                continue
            changed = replace(run, config=change.config, placement=placement)
            tables[change.key, change.value] = run_tables(changed, nodes)
    return tables


def _effects(
    table: MemoryTable,
    before: Sequence[MemoryTable],
    changed: dict[tuple[str, str], tuple[MemoryTable, ...]],
) -> tuple[Change, ...]:
    """Effects of the changes on the kind of `table`; changes that make another table overflow are left out."""
    overfull = {other.kind for other in before if not other.fits}
    changes = []
    for (key, value), tables in changed.items():
        same_kind = [other for other in tables if other.kind == table.kind]
        still_overfull = {other.kind for other in tables if not other.fits}
        freed = table.needed_bytes - max((other.needed_bytes for other in same_kind), default=0)
        if freed > 0 and still_overfull <= overfull:
            changes.append(Change(key=key, value=value, freed_bytes=freed, suffices=not still_overfull))
    return tuple(sorted(changes, key=lambda change: (-change.freed_bytes, change.key)))


def sft_memory(config: SftConfig, spec: ModelSpec, node: NodeResources, *, flash_attention: str = "") -> MemoryPlan:
    """The plan of a supervised warm start; `flash_attention` as in `sft_tables`."""
    tables = sft_tables(config, spec, node, flash_attention=flash_attention)
    lacking = [table for table in tables if not table.fits]
    known = sft_conflicts(config, spec, node)
    changed = {
        (change.key, change.value): sft_tables(change.config, spec, node, flash_attention=flash_attention)
        for change in (sft_changes_of(config) if lacking else ())
        if sft_conflicts(change.config, spec, node) <= known
    }
    return MemoryPlan(
        tables=tables,
        shortages=tuple(Shortage(table=table, changes=_effects(table, tables, changed)) for table in lacking),
    )


def allocator_problems(transport: Transport, environment: Mapping[str, str]) -> list[str]:
    """Settings of torch's allocator with which no other process can map weights.

    torch shares memory of expandable segments by a file descriptor of the process that owns it. Taking the descriptor
    needs the right to trace that process, which containers do not give.
    """
    return [
        f"the variable {name}={environment[name]}: weights travel by `publish.transport` = cuda_ipc, for which engines "
        "cannot map expandable segments; remove `expandable_segments:True` from it, or set `publish.transport` to shm"
        for name in ALLOCATOR
        if transport == "cuda_ipc" and "expandable_segments:true" in environment.get(name, "").lower()
    ]


def export_problems(spec: ModelSpec, trainer: TrainerConfig, node: NodeResources, *, is_alone: bool) -> list[str]:
    """Problems of an export's weights on a node, which has all ranks if it `is_alone`."""
    parallel, plain = trainer.parallel, trainer.model_copy(update={"fp8": "none"})
    stages = [rank_state(spec, plain, pipeline_rank=rank).parameters for rank in range(parallel.pipeline)]
    if node.gpu_bytes:
        needed, available, what = max(stages) + CONTEXT_BYTES, min(node.gpu_bytes), "a rank's weights take"
    elif is_alone:
        ranks = parallel.world_size // parallel.pipeline
        needed = ranks * (sum(stages) + parallel.pipeline * TRAINER_PROCESS_BYTES)
        available, what = node.available_bytes, "the weights of all ranks take"
    else:
        return []
    if needed <= available:
        return []
    fix = "raise `trainer.parallel.tensor` or `pipeline`" if node.gpu_bytes else "export on a machine with more memory"
    return [f"{what} {gib(needed)} with their processes, and {gib(available)} are available; {fix}"]
