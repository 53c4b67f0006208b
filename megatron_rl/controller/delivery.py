"""The controller's side of sending a publish from trainer ranks to engines: one class per transport.

A *staged* delivery (shared memory, colocated): every trainer rank stages all its buckets, then engines verify all of
them before they apply any. A *streaming* delivery (gloo, NCCL): engines verify and apply bucket after bucket while
trainer ranks quantise and send.

`deliver` gets a manifest that every engine has accepted. It calls `meanwhile` when the trainer's part is done, while
engines still apply, and returns when every engine has applied the weights. Engines do not serve them yet.

Staged buckets are released when all engines have applied them, or when the delivery has failed. After a failure a late
engine may still copy from memory of a device that the trainer uses again, and load wrong bytes. It never serves them:

* It serves after `prove` and `resume` alone, which a publish with a failed delivery does not reach.
* It finishes a late update before it begins the next one (`EngineWeights`), which loads all its weights again.
* If its ranks stay late, it is ended before buckets are staged again (`EngineGroup.end_silent`).

Its end is not awaited before the release, because an engine that starts in another's place needs the memory. In shared
memory a late engine reads the right bytes: a file is never written again, and lives as long as somebody maps it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.messages import StagedWeights
from rollout.engine.state import UpdateTimes
from rollout.failures import DeadlineError, Place
from rollout.pool.engine_group import EngineGroup
from rollout.transports.base import Backend, ColocatedChannel, Memory, ShmChannel, chain, side_by_side
from rollout.weights.manifest import WeightManifest

GRACE_S = 30.0
"""Extra time for a trainer rank to name a late engine or rank by itself, before the trainer counts as hung."""

Meanwhile = Callable[[], None]
"""Starts work of the trainer beside the engines' part of a delivery, without waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryReport:
    """Measurements of both sides of a delivered publish."""

    staged: tuple[StagedWeights, ...]
    """By trainer rank."""
    updates: tuple[UpdateTimes, ...]
    """By engine."""


class WeightDelivery(Protocol):
    """One transport between a trainer and its engines."""

    def connect(self) -> None:
        """Connect trainer ranks and engines: before the first publish, and again after engines were replaced.

        Raises:
            PlacedError: naming an engine that did not join, or the trainer.
        """
        ...

    def deliver(self, manifest: WeightManifest, meanwhile: Meanwhile, *, with_sums: bool = True) -> DeliveryReport:
        """Send one publish from the trainer ranks to every engine and apply it.

        `with_sums` as in `WeightPacker.send`.
        """
        ...


class ShmDelivery:
    """Shared memory on one node."""

    def __init__(self, trainer: TrainerGroup, engines: EngineGroup, *, timeout_s: float) -> None:
        self._trainer = trainer
        self._engines = engines
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Select shared memory on trainer ranks and engines."""
        self._trainer.ranks.call("open_shm")
        joining = self._engines.begin_init_transport(dict.fromkeys(self._engines.alive, ShmChannel()))
        self._engines.wait(joining, timeout_s=self._timeout_s)

    def deliver(self, manifest: WeightManifest, meanwhile: Meanwhile, *, with_sums: bool = True) -> DeliveryReport:
        """Stage all buckets, apply them, release them."""
        staged = self._trainer.stage(manifest.weight_version, timeout_s=self._timeout_s, with_sums=with_sums)
        segments = {part.rank: part.path for part in staged if part.path}
        try:
            applying = self._engines.begin_update(
                manifest, dict.fromkeys(self._engines.alive, segments), with_sums=with_sums
            )
            meanwhile()
            updates = self._engines.wait(applying, timeout_s=self._timeout_s)
        finally:
            self._trainer.unstage()  # perhaps under a late engine: see the head of this file
        return DeliveryReport(staged=tuple(staged), updates=tuple(updates.values()))


class StreamingDelivery:
    """gloo or NCCL in a chain: sending trainer ranks, engines of the first node, engines of the second node, ..."""

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
        """Join one process group per engine, which holds the engine and its senders; returns when all are complete."""
        nodes = self._engines.node_ids(timeout_s=self._timeout_s)
        stores = self._trainer.open_stores(self._source_ranks[0], len(nodes))
        order = side_by_side(nodes)
        channels = chain(
            dict(zip(nodes, stores, strict=True)),
            order=order,
            source_ranks=self._source_ranks,
            num_engine_ranks=self._engines.num_ranks,
            timeout_s=self._timeout_s,
            backend=self._backend,
        )
        joining = self._engines.begin_init_transport(channels)
        first = order[0]
        faults = self._trainer.attach_group(first, channels[first])
        self._engines.wait(joining, timeout_s=self._timeout_s)
        if fault := next(filter(None, faults), ""):
            raise DeadlineError(fault, Place(role="engine", ranks=(first,)))

    def deliver(self, manifest: WeightManifest, meanwhile: Meanwhile, *, with_sums: bool = True) -> DeliveryReport:
        """Send and apply bucket after bucket."""
        nothing: dict[int, dict[int, str]] = {number: {} for number in self._engines.alive}
        applying = self._engines.begin_update(manifest, nothing, with_sums=with_sums)
        limit_s = self._timeout_s + GRACE_S
        sent = self._trainer.stage(manifest.weight_version, timeout_s=limit_s, with_sums=with_sums)
        meanwhile()
        updates = self._engines.wait(applying, timeout_s=self._timeout_s)
        if late := next((part for part in sent if part.fault), None):
            raise DeadlineError(f"trainer rank {late.rank}: {late.fault}", Place(role="engine"))
        return DeliveryReport(staged=tuple(sent), updates=tuple(updates.values()))


class ColocatedDelivery:
    """Colocated engines: each device's trainer rank stages the buckets of the engine ranks on the same device.

    Without devices, a trainer rank of the same node does. Buckets enter each node once.
    """

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
        """Tell trainer ranks and engines which of their ranks share a device."""
        hosted = [
            sorted({rank for home in self._homes for rank, host in enumerate(home) if host == trainer_rank})
            for trainer_rank in range(self._trainer.ranks.num_ranks)
        ]
        self._trainer.ranks.call("open_colocated", hosted, self._memory, self._trainer.ranks.node_ids)
        channels = {
            number: ColocatedChannel(
                memory=self._memory, shared_with=tuple(tuple(hosted[host]) for host in self._homes[number])
            )
            for number in self._engines.alive
        }
        joining = self._engines.begin_init_transport(channels)
        self._engines.wait(joining, timeout_s=self._timeout_s)

    def deliver(self, manifest: WeightManifest, meanwhile: Meanwhile, *, with_sums: bool = True) -> DeliveryReport:
        """Exchange and stage all buckets, apply them, release them."""
        limit_s = self._timeout_s + GRACE_S
        staged = self._trainer.stage(manifest.weight_version, timeout_s=limit_s, with_sums=with_sums)
        paths = {part.rank: part.path for part in staged}
        addresses = {
            number: {rank: paths[host] for rank, host in enumerate(self._homes[number])}
            for number in self._engines.alive
        }
        try:
            applying = self._engines.begin_update(manifest, addresses, with_sums=with_sums)
            meanwhile()
            updates = self._engines.wait(applying, timeout_s=self._timeout_s)
        finally:
            self._trainer.unstage()  # perhaps under a late engine: see the head of this file
        return DeliveryReport(staged=tuple(staged), updates=tuple(updates.values()))
