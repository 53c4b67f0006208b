"""Free memory of every node of the doctor's SLURM step, which need not have as much as the first one.

Each node writes its figures into the folder of the network check, before that check. The first node reads them
afterwards.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.cluster.node import NodeResources
from launcher.run_dir.atomic_files import replace_text


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """What a node has free."""

    node: str
    available_bytes: int
    """Of the host."""
    shared_bytes: int
    """In `/dev/shm`."""

    def __str__(self) -> str:
        return f"{self.available_bytes >> 20} MiB free on {self.node}"


def write_memory(folder: Path, node: str, local: NodeResources) -> None:
    """Write the figures of this node; `folder` is seen by all nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    free = FreeMemory(node=node, available_bytes=local.available_bytes, shared_bytes=local.shared_bytes)
    replace_text(folder / f"{node}.memory", json.dumps(asdict(free)) + "\n")


def read_memory(folder: Path, nodes: Sequence[str]) -> tuple[FreeMemory, ...]:
    """Figures of these nodes, in their order; empty if one of them has written none."""
    files = [folder / f"{node}.memory" for node in nodes]
    if not all(file.exists() for file in files):
        return ()
    return tuple(FreeMemory(**json.loads(file.read_text(encoding="utf-8"))) for file in files)


def least(step: Sequence[FreeMemory]) -> FreeMemory:
    """The node with the least memory of the host."""
    return min(step, key=lambda free: free.available_bytes)


def with_memory(nodes: Sequence[NodeResources], step: Sequence[FreeMemory]) -> tuple[NodeResources, ...]:
    """Expected nodes with the figures of a step's nodes, one after the other. Pure.

    Of a longer step the nodes with the least memory count, because a job may use any. Further nodes get the least.
    """
    poorest = sorted(step, key=lambda free: free.available_bytes)[: len(nodes)]
    figures = [*(step if len(step) <= len(nodes) else poorest), *[least(step)] * len(nodes)]
    return tuple(
        replace(node, available_bytes=free.available_bytes, shared_bytes=free.shared_bytes)
        for node, free in zip(nodes, figures, strict=False)
    )
