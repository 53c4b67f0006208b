"""How a publish gets from trainer ranks to engines, as the controller sees it: one object per transport.

A *staged* delivery (shared memory, colocated) lets every rank lay down its whole share first; engines then look at all
of it before they touch anything. A *streaming* delivery (gloo, NCCL) has engines wait for buckets while trainer ranks
quantise and send. All are given a manifest that every engine has accepted, and return when every engine has applied it
(and is not serving yet).
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
class DeliveryReport:
    """What the two ends say of a publish that has come."""

    staged: tuple[StagedWeights, ...]
    """By trainer rank."""
    updates: tuple[UpdateTimes, ...]
    """By engine."""


class WeightDelivery(Protocol):
    """One transport between a trainer and its engines."""

    def connect(self) -> None:
        """Join both ends; once, before the first publish."""
        ...

    def deliver(self, manifest: WeightManifest) -> DeliveryReport:
        """Bring one publish from every trainer rank into every engine."""
        ...


class ShmDelivery:
    """Shared memory on one node."""

    def __init__(self, trainer: TrainerGroup, engines: EngineGroup, *, timeout_s: float) -> None:
        self._trainer = trainer
        self._engines = engines
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Tell both ends to use shared memory."""
        self._trainer.ranks.call("open_shm")
        joining = self._engines.begin_init_transport(dict.fromkeys(self._engines.alive, ShmChannel()))
        self._engines.wait(joining, timeout_s=self._timeout_s)

    def deliver(self, manifest: WeightManifest) -> DeliveryReport:
        """Stage everything, apply it, let go of it."""
        staged = self._trainer.stage(manifest.weight_version, timeout_s=self._timeout_s)
        segments = {part.rank: part.path for part in staged if part.path}
        try:
            applying = self._engines.begin_update(manifest, dict.fromkeys(self._engines.alive, segments))
            updates = self._engines.wait(applying, timeout_s=self._timeout_s)
        finally:
            self._trainer.unstage()
        return DeliveryReport(staged=tuple(staged), updates=tuple(updates.values()))


class StreamingDelivery:
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
        nodes = self._engines.node_ids(timeout_s=self._timeout_s)
        addresses = self._trainer.open_stores(self._source_ranks[0], len(nodes), timeout_s=self._timeout_s)
        order = side_by_side(list(nodes.values()))
        channels = chain(
            addresses,
            order=order,
            source_ranks=self._source_ranks,
            num_engine_ranks=self._engines.num_ranks,
            timeout_s=self._timeout_s,
            backend=self._backend,
        )
        joining = self._engines.begin_init_transport(dict(zip(nodes, channels, strict=True)))
        self._trainer.ranks.call("attach_group", order[0], channels[order[0]])
        self._engines.wait(joining, timeout_s=self._timeout_s)

    def deliver(self, manifest: WeightManifest) -> DeliveryReport:
        """Send and apply bucket after bucket."""
        applying = self._engines.begin_update(manifest, {number: {} for number in self._engines.alive})
        sent = self._trainer.stage(manifest.weight_version, timeout_s=self._timeout_s)
        updates = self._engines.wait(applying, timeout_s=self._timeout_s)
        return DeliveryReport(staged=tuple(sent), updates=tuple(updates.values()))


class ColocatedDelivery:
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
        channels = {
            number: ColocatedChannel(
                memory=self._memory, shared_with=tuple(tuple(hosted[host]) for host in self._homes[number])
            )
            for number in self._engines.alive
        }
        joining = self._engines.begin_init_transport(channels)
        self._engines.wait(joining, timeout_s=self._timeout_s)

    def deliver(self, manifest: WeightManifest) -> DeliveryReport:
        """Exchange and stage everything, apply it, let go of it."""
        staged = self._trainer.stage(manifest.weight_version, timeout_s=self._timeout_s)
        paths = {part.rank: part.path for part in staged}
        addresses = {
            number: {rank: paths[host] for rank, host in enumerate(self._homes[number])}
            for number in self._engines.alive
        }
        try:
            applying = self._engines.begin_update(manifest, addresses)
            updates = self._engines.wait(applying, timeout_s=self._timeout_s)
        finally:
            self._trainer.unstage()
        return DeliveryReport(staged=tuple(staged), updates=tuple(updates.values()))
