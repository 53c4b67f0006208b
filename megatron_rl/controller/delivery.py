"""How a publish gets from trainer ranks to engines, as the controller sees it: one object per transport.

A *staged* link (shared memory, hand-over) lets every rank lay down its whole share first; engines then look at all of
it before they touch anything. A *streaming* link (gloo, NCCL) has engines wait for buckets while trainer ranks quantise
and send. All are given a manifest that every engine has accepted, and return when every engine has applied it (and is
not serving yet).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.results import StagedWeights
from rollout.engine.state import UpdateTimes
from rollout.pool.engine_group import EngineGroup
from rollout.transports.base import Backend, ColocatedChannel, Memory, ShmChannel, chain, side_by_side
from rollout.weights.manifest import WeightManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What the two ends say of a publish that has come."""

    staged: tuple[StagedWeights, ...]
    """By trainer rank."""
    updates: tuple[UpdateTimes, ...]
    """By engine."""


class Link(Protocol):
    """One transport between a trainer and its engines."""

    def connect(self) -> None:
        """Join both ends; once, before the first publish."""
        ...

    def deliver(self, manifest: WeightManifest) -> Delivery:
        """Bring one publish from every trainer rank into every engine."""
        ...


class ShmLink:
    """Shared memory on one node."""

    def __init__(self, trainer: TrainerGroup, engines: EngineGroup, *, timeout_s: float) -> None:
        self._trainer = trainer
        self._engines = engines
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Tell both ends to use shared memory."""
        self._trainer.ranks.call("open_shm")
        self._engines.call("init_transport", ShmChannel(), timeout_s=self._timeout_s)

    def deliver(self, manifest: WeightManifest) -> Delivery:
        """Stage everything, apply it, let go of it."""
        staged = self._trainer.stage(manifest.weight_version, timeout_s=self._timeout_s)
        segments = {part.rank: part.path for part in staged if part.path}
        try:
            found = self._engines.call("update", manifest, segments, timeout_s=self._timeout_s)
        finally:
            self._trainer.unstage()
        return _delivery(staged, found)


class GroupLink:
    """gloo or NCCL, in a chain: trainer ranks that send, then the engines of one node, of the next one, and so on."""

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        *,
        source_ranks: tuple[int, ...],
        timeout_s: float,
        backend: Backend = "gloo",
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._source_ranks = source_ranks
        self._timeout_s = timeout_s
        self._backend: Backend = backend

    def connect(self) -> None:
        """Join one group per engine, with what sends to it; returns when all of them are complete."""
        actors = self._engines.actors
        addresses = self._trainer.open_stores(self._source_ranks[0], len(actors), timeout_s=self._timeout_s)
        asking = [actor.node_id.remote() for actor in actors]
        nodes = [str(node) for node in self._engines.wait(asking, "node_id", timeout_s=self._timeout_s)]
        order = side_by_side(nodes)
        channels = chain(
            addresses,
            order=order,
            source_ranks=self._source_ranks,
            num_engine_ranks=self._engines.num_ranks,
            timeout_s=self._timeout_s,
            backend=self._backend,
        )
        joining = [actor.init_transport.remote(channel) for actor, channel in zip(actors, channels, strict=True)]
        self._trainer.ranks.call("attach_group", order[0], channels[order[0]])
        self._engines.wait(joining, "init_transport", timeout_s=self._timeout_s)

    def deliver(self, manifest: WeightManifest) -> Delivery:
        """Send and apply bucket after bucket."""
        applying = self._engines.begin("update", manifest, {})
        sent = self._trainer.stage(manifest.weight_version, timeout_s=self._timeout_s)
        return _delivery(sent, self._engines.wait(applying, "update", timeout_s=self._timeout_s))


class HandOverLink:
    """Colocated engines: each device's trainer rank lays down what the engine ranks on it take."""

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        *,
        homes: Sequence[Sequence[int]],
        memory: Memory,
        timeout_s: float,
    ) -> None:
        """`homes`: by engine and rank, the trainer rank on the same device; `memory` as in `ColocatedChannel`."""
        self._trainer = trainer
        self._engines = engines
        self._memory: Memory = memory
        self._timeout_s = timeout_s
        self._homes = homes

    def connect(self) -> None:
        """Tell both ends who lies on whose device."""
        hosted = [
            sorted({rank for home in self._homes for rank, host in enumerate(home) if host == trainer_rank})
            for trainer_rank in range(self._trainer.ranks.num_ranks)
        ]
        self._trainer.ranks.call("open_hand_over", hosted, self._memory)
        joining = [
            actor.init_transport.remote(
                ColocatedChannel(memory=self._memory, shared_with=tuple(tuple(hosted[host]) for host in home))
            )
            for actor, home in zip(self._engines.actors, self._homes, strict=True)
        ]
        self._engines.wait(joining, "init_transport", timeout_s=self._timeout_s)

    def deliver(self, manifest: WeightManifest) -> Delivery:
        """Exchange and stage everything, apply it, let go of it."""
        staged = self._trainer.stage(manifest.weight_version, timeout_s=self._timeout_s)
        addresses = {part.rank: part.path for part in staged}
        try:
            applying = [
                actor.update.remote(manifest, {rank: addresses[host] for rank, host in enumerate(home)})
                for actor, home in zip(self._engines.actors, self._homes, strict=True)
            ]
            found = self._engines.wait(applying, "update", timeout_s=self._timeout_s)
        finally:
            self._trainer.unstage()
        return _delivery(staged, found)


def _delivery(staged: Sequence[StagedWeights], updates: Sequence[object]) -> Delivery:
    times = tuple(one for one in updates if isinstance(one, UpdateTimes))
    return Delivery(staged=tuple(staged), updates=times)
