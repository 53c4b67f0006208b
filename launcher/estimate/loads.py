"""What a placement puts on each device and on each node, with equal ones counted together. Pure."""

from collections import Counter
from dataclasses import dataclass

from launcher.cluster.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """Ranks that share one device."""

    num_trainers: int
    """Trainer ranks, 0 or 1."""
    num_engine_ranks: int

    @property
    def title(self) -> str:
        """The ranks, for people."""
        parts = []
        if self.num_trainers:
            parts.append("a trainer rank")
        if self.num_engine_ranks:
            parts.append("an engine rank" if self.num_engine_ranks == 1 else f"{self.num_engine_ranks} engine ranks")
        return " and ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """Processes on one node."""

    num_trainers: int
    """Trainer ranks."""
    num_engines: int
    num_engine_ranks: int
    is_first: bool
    """Whether the controller and the text actor are here."""
    num_scorers: int
    num_shards: int
    """History shards."""
    num_readers: int
    """History readers, 0 or 1."""
    num_staged_shards: int
    """Shards that the node's trainer ranks hold for engine ranks in shared memory. Those that a trainer rank holds for
    equal ranks of several engines count once."""

    @property
    def title(self) -> str:
        """The role of the node, for people."""
        roles = [
            *(["controller"] if self.is_first else []),
            *(["trainer"] if self.num_trainers else []),
            *(["engines"] if self.num_engine_ranks else []),
        ]
        return " + ".join(roles) or "unused"


def device_loads(placement: Placement) -> dict[DeviceLoad, int]:
    """Number of devices with each load; devices without ranks are left out."""
    trainers = Counter((slot.node, device) for slot in placement.trainers for device in slot.devices)
    engines = Counter((slot.node, device) for slot in placement.engines for device in slot.devices)
    places = dict.fromkeys([*trainers, *engines])
    return dict(Counter(DeviceLoad(num_trainers=trainers[place], num_engine_ranks=engines[place]) for place in places))


def node_loads(placement: Placement) -> dict[NodeLoad, list[str]]:
    """Names of the nodes with each load, in the order of the nodes."""
    trainers = Counter(slot.node for slot in placement.trainers)
    engines = Counter(slot.node for slot in placement.engines)
    ranks = Counter(dict.fromkeys(placement.nodes, 0))
    for slot in placement.engines:
        ranks[slot.node] += slot.num_ranks
    history = placement.history
    shards, scorers = Counter(history.shards), Counter(placement.scorers)
    node_of = {trainer.rank: trainer.node for trainer in placement.trainers}
    homes = placement.homes if placement.transport == "shm" else ()
    held = {(host, rank) for home in homes for rank, host in enumerate(home)}
    staged = Counter(node_of[host] for host, _ in held)
    loads: dict[NodeLoad, list[str]] = {}
    for number, node in enumerate(placement.nodes):
        load = NodeLoad(
            num_trainers=trainers[node],
            num_engines=engines[node],
            num_engine_ranks=ranks[node],
            is_first=number == 0,
            num_scorers=scorers[node],
            num_shards=shards[node],
            num_readers=int(node in history.readers),
            num_staged_shards=staged[node],
        )
        loads.setdefault(load, []).append(node)
    return loads
