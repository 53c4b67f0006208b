"""Distributes the tensor-parallel groups of the trainer and the engines over nodes. Pure.

Megatron's rank order is fixed (tensor, data, pipeline). The node and the device of each rank are free. Groups of tensor
ranks never leave a node. They take the nodes in the order of communication: expert groups (all-to-all in every layer),
then the pipeline stages of one replica, then replicas, which reduce gradients once per step.

The size of a node is its number of devices. Without devices it is its number of cores. Devices are filled node after
node, because neighbours communicate faster inside a node. Cores are shared out evenly over all nodes, because processes
may share cores and every node of the run should work.

Invariants: a tensor-parallel group and an engine each lie inside one node; the shares of equal nodes depend only on the
order of the nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.cluster.node import NodeResources
from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.ranks import TrainerRank, trainer_ranks
from rollout.config import EngineConfig
from rollout.types import EngineSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """A node and the ranks on it."""

    node: NodeResources
    on_devices: bool
    """Whether ranks use devices; otherwise cores."""
    num_groups: int = 0
    """Tensor-parallel groups of the trainer."""
    num_trainers: int = 0
    """Trainer ranks."""
    num_engines: int = 0

    @property
    def size(self) -> int:
        """Devices, or cores."""
        return len(self.node.gpu_bytes) if self.on_devices else self.node.cpu_cores


def near_together(nodes: Sequence[NodeResources]) -> list[NodeResources]:
    """The nodes, with those of one block adjacent, and inside a block those of one rack. The first stays first.

    Nodes without labels keep their order.
    """
    blocks = [node.block for node in nodes]
    racks = [(node.block, node.rack) for node in nodes]
    return sorted(nodes, key=lambda node: (blocks.index(node.block), racks.index((node.block, node.rack))))


def unused(nodes: Sequence[NodeResources]) -> list[NodeUse]:
    """The nodes in order of placement, without ranks. Nodes without devices are unused if others have some."""
    on_devices = any(node.gpu_bytes for node in nodes)
    return [NodeUse(node=node, on_devices=on_devices) for node in near_together(nodes)]


def communication_order(parallel: ParallelConfig) -> list[int]:
    """First rank of each tensor-parallel group; groups that communicate most are adjacent."""
    groups = [(data, pipeline) for pipeline in range(parallel.pipeline) for data in range(parallel.data)]
    near = sorted(groups, key=lambda group: (group[0] // parallel.expert, group[1], group[0] % parallel.expert))
    return [parallel.tensor * (data + parallel.data * pipeline) for data, pipeline in near]


def fill_in_order(num_groups: int, rooms: Sequence[int]) -> list[int]:
    """Groups on each node if nodes are filled one after another; `rooms` are the groups that fit on each node."""
    counts: list[int] = []
    for room in rooms:
        counts.append(min(room, num_groups - sum(counts)))
    return counts


def share_in_order(num_groups: int, sizes: Sequence[int]) -> list[int]:
    """Groups on each node, in proportion to its size; adjacent groups get the same node or the next one."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    homes = [
        next(n for n, end in enumerate(ends) if group * ends[-1] < num_groups * end) for group in range(num_groups)
    ]
    return [homes.count(number) for number in range(len(sizes))]


def spread_evenly(num_engines: int, sizes: Sequence[int], rooms: Sequence[int] | None = None) -> list[int]:
    """Engines on each node. Each goes to the node with the fewest engines for its size, to the first of equal nodes.

    `rooms` are the engines that fit on each node; None lets engines share devices or cores.
    """
    counts = [0] * len(sizes)
    for _ in range(num_engines):
        free = [n for n, size in enumerate(sizes) if size and (rooms is None or counts[n] < rooms[n])]
        emptiest = min(free, key=lambda n: ((counts[n] + 1) / sizes[n], n))
        counts[emptiest] += 1
    return counts


def place_trainer(
    trainer: TrainerConfig, uses: Sequence[NodeUse], groups: Sequence[int], *, num_gpus: float = 0.0
) -> tuple[tuple[TrainerRank, ...], list[NodeUse]]:
    """Trainer ranks on their nodes, and the nodes with them.

    On a node, ranks use devices in the order of their numbers.

    Args:
        trainer: partition and threads.
        uses: nodes in order of placement.
        groups: tensor-parallel groups on each node.
        num_gpus: share of a device that a rank reserves.
    """
    parallel = trainer.parallel
    ranks = trainer_ranks(parallel, trainer.cpu_threads, num_gpus)
    waiting = communication_order(parallel)
    placed: list[TrainerRank] = []
    after = []
    for use, count in zip(uses, groups, strict=True):
        firsts, waiting = sorted(waiting[:count]), waiting[count:]
        numbers = [first + tensor for first in firsts for tensor in range(parallel.tensor)]
        for device, number in enumerate(numbers):
            devices = (device,) if use.on_devices else ()
            placed.append(replace(ranks[number], node=use.node.name, devices=devices))
        after.append(replace(use, num_groups=count, num_trainers=len(numbers)))
    return tuple(sorted(placed, key=lambda rank: rank.rank)), after


def place_engines(
    engine: EngineConfig, uses: Sequence[NodeUse], counts: Sequence[int], *, beside_trainer: bool
) -> tuple[tuple[EngineSlot, ...], list[NodeUse]]:
    """Engines on their nodes without a share of a device, and the nodes with them.

    On a node, ranks use devices in order, and begin again with the first device after the last one.

    Args:
        engine: number and size of engines.
        uses: nodes in order of placement.
        counts: engines on each node.
        beside_trainer: whether engines begin after the trainer's devices, or at the first device.
    """
    slots: list[EngineSlot] = []
    for use, count in zip(uses, counts, strict=True):
        first = use.num_trainers if beside_trainer else 0
        for number in range(count):
            start = first + number * engine.tensor_parallel
            devices = tuple((start + rank) % use.size for rank in range(engine.tensor_parallel))
            slots.append(
                EngineSlot(
                    engine_id=len(slots),
                    num_ranks=engine.tensor_parallel,
                    cpu_cores=engine.cpu_cores,
                    num_gpus=0.0,
                    node=use.node.name,
                    devices=devices if use.on_devices else (),
                )
            )
    return tuple(slots), [replace(use, num_engines=count) for use, count in zip(uses, counts, strict=True)]
