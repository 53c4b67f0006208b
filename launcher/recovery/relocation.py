"""Where the processes of lost nodes go. Pure.

A lost node is replaced as a whole by an unused node of at least its size, so trainer ranks and engines that share
devices still do. Nodes with trainer ranks come first, because the run cannot go on without them: if no node is unused,
such a node is replaced by one that has only engines. Engines that lose their place use free devices of other nodes, if
weights reach them there. Other engines are retired. One engine is always left.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.cluster.node import NodeResources
from launcher.cluster.placement import Placement
from rollout.types import EngineSlot

REACH_EVERY_NODE = ("gloo", "nccl")
"""Transports of weights to engines on any node."""
SAME_KIND = 0.99
"""Least share of a lost device's memory that a device of the same kind has: drivers reserve different amounts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """A placement without the lost nodes."""

    placement: Placement
    replaced: Mapping[str, str]
    """Lost nodes, and the node that replaces each: an unused one, or one whose engines had to leave."""
    unplaced_ranks: tuple[int, ...]
    """Trainer ranks that have no place: the run cannot go on. They keep their lost node."""


def relocate(
    placement: Placement, lost: Collection[str], known: Mapping[str, NodeResources], unused: Sequence[NodeResources]
) -> Relocation:
    """Take the lost nodes out of a placement.

    Args:
        placement: of the run so far.
        lost: names of its nodes that are gone.
        known: resources of all nodes of the placement, by name.
        unused: other nodes that are alive, in order of preference.
    """
    with_ranks = {rank.node for rank in placement.trainers}
    replaced: dict[str, str] = {}
    spares, givers = list(unused), _givers(placement, lost, known)
    for node in sorted(lost, key=lambda name: (name not in with_ranks, placement.nodes.index(name))):
        spare = next((each for each in spares if _is_as_large(each, known[node])), None)
        giver = next((each for each in givers if _is_as_large(each, known[node])), None)
        if spare is not None:
            spares.remove(spare)
            replaced[node] = spare.name
        elif giver is not None and node in with_ranks:
            givers.remove(giver)
            replaced[node] = giver.name
    homeless = set(lost) - replaced.keys()
    leaving = {slot.engine_id for slot in placement.serving if slot.node in homeless | set(replaced.values())}
    trainers = tuple(replace(rank, node=replaced.get(rank.node, rank.node)) for rank in placement.trainers)
    engines = tuple(replace(slot, node=replaced.get(slot.node, slot.node)) for slot in placement.engines)
    left = dict.fromkeys(replaced.get(name, name) for name in placement.nodes if name not in homeless)
    moved = replace(placement, nodes=tuple(left), trainers=trainers, engines=engines)
    rooms = {node.name: node for node in (*known.values(), *unused) if node.name in left}
    engines, retired = _into_free_devices(moved, leaving, rooms)
    return Relocation(
        placement=replace(moved, engines=engines, retired=retired),
        replaced=replaced,
        unplaced_ranks=tuple(rank.rank for rank in trainers if rank.node in homeless),
    )


def _givers(placement: Placement, lost: Collection[str], known: Mapping[str, NodeResources]) -> list[NodeResources]:
    """Nodes that have only engines, the last first; without the one whose engines stay in any case."""
    used = {placement.nodes[0], *(rank.node for rank in placement.trainers)} | set(lost)
    serving = list(dict.fromkeys(slot.node for slot in placement.serving if slot.node not in lost))
    others = serving if any(node in used for node in serving) else serving[1:]
    return [known[node] for node in reversed(others) if node not in used]


def _is_as_large(node: NodeResources, lost: NodeResources) -> bool:
    least = SAME_KIND * min(lost.gpu_bytes, default=0)
    return (
        node.cpu_cores >= lost.cpu_cores
        and len(node.gpu_bytes) >= len(lost.gpu_bytes)
        and all(size >= least for size in node.gpu_bytes)
    )


def _into_free_devices(
    placement: Placement, leaving: Collection[int], rooms: Mapping[str, NodeResources]
) -> tuple[tuple[EngineSlot, ...], tuple[int, ...]]:
    """The engines with these numbers on free devices of `rooms`, and the numbers of those that find none."""
    staying = [slot for slot in placement.serving if slot.engine_id not in leaving]
    rest = {name: set(range(len(node.gpu_bytes))) for name, node in rooms.items()}
    for rank in placement.trainers:
        rest.get(rank.node, set()).difference_update(rank.devices)
    for slot in staying:
        rest.get(slot.node, set()).difference_update(slot.devices)
    engines, retired = list(placement.engines), list(placement.retired)
    for number in sorted(leaving):
        slot = placement.engines[number]
        reaches = slot.devices and placement.transport in REACH_EVERY_NODE
        node = next((name for name, free in rest.items() if reaches and len(free) >= slot.num_ranks), None)
        if node is None:
            retired.append(number)
            continue
        devices = tuple(sorted(rest[node])[: slot.num_ranks])
        rest[node].difference_update(devices)
        engines[number] = replace(slot, node=node, devices=devices)
    return tuple(engines), tuple(sorted(retired))
