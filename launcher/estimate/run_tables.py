"""All memory tables of a run: of each kind of device, of the host of each kind of node, and of its `/dev/shm`. Pure."""

import sys
from collections.abc import Sequence

from launcher.cluster.node import NodeResources
from launcher.estimate.cpu_memory import cpu_table
from launcher.estimate.device_memory import device_table
from launcher.estimate.host_memory import SHARED_MEMORY, host_table
from launcher.estimate.loads import device_loads, node_loads
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.tables import MemoryTable


def run_tables(run: PlannedRun, nodes: Sequence[NodeResources]) -> tuple[MemoryTable, ...]:
    """The tables of `run` on `nodes`, the nodes of its placement."""
    by_name = {node.name: node for node in nodes}
    smallest_gpu = min((size for node in nodes for size in node.gpu_bytes), default=0)
    tables = [
        device_table(run, load, count=count, available_bytes=smallest_gpu)
        for load, count in device_loads(run.placement).items()
    ]
    for load, names in node_loads(run.placement).items():
        host = host_table if smallest_gpu else cpu_table
        available = min(by_name[name].available_bytes for name in names)
        table = host(run, load, count=len(names), available_bytes=available)
        shared = min(by_name[name].shared_bytes for name in names)
        tables += [table, *([_shared(run, table, shared)] if shared < sys.maxsize else [])]
    return tuple(tables)


def _shared(run: PlannedRun, table: MemoryTable, available_bytes: int) -> MemoryTable:
    """The part of a host's table that lies in `/dev/shm`. A Ray cluster that already runs has made its store."""
    started = set() if run.config.cluster.address == "local" else {"object store"}
    elsewhere = set() if run.placement.transport == "shm" else {"weights in transit"}
    counted = SHARED_MEMORY - started - elsewhere
    return MemoryTable(
        kind="/dev/shm",
        load=table.load,
        count=table.count,
        phases={phase: tuple(item for item in items if item.what in counted) for phase, items in table.phases.items()},
        available_bytes=available_bytes,
    )
