"""Streaming transport over gloo: buckets go from trainer ranks to engine ranks in index order.

Each engine incarnation has a process group of its own: the source trainer ranks, then the engine's
ranks. The groups are made of bare `ProcessGroupGloo` objects over a store of their own, so neither
Megatron's nor vLLM's default group notices. A bucket goes to every rank of every attached engine,
since vLLM's loaders cut their shard out of whole tensors.

gloo cannot go on after a deadline has passed: the connection is closed. A channel on which somebody
was late is dead, and a new one has to be made (`Engine.init_transport`, `GlooSender.attach`).

Invariant: the tag of a message is its bucket's index, so a bucket is never taken for another.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rollout.transports.base import GlooChannel
from rollout.types import WeightVersion
from rollout.wire import Bucket, seal, verify


class Group(Protocol):
    """What is used of a process group."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Begin to send to a rank."""
        ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Begin to receive from a rank."""
        ...


def open_store(*, host: str, timeout_s: float) -> TCPStore:
    """Open the store of a new group on a free port of this host; the caller keeps it as long as the group lives.

    Its `port` goes into the `GlooChannel`. Only the first source rank does this.
    """
    return TCPStore(host, 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def _join(channel: GlooChannel, group_rank: int) -> Group:
    """Join a channel's group; returns when all its processes have come.

    Raises:
        RuntimeError: not everybody came in time.
    """
    timeout = timedelta(seconds=channel.timeout_s)
    present = f"present/{group_rank}"
    try:
        store = TCPStore(channel.host, channel.port, None, is_master=False, timeout=timeout)
        store.set(present, "1")
        store.wait([f"present/{rank}" for rank in range(channel.world_size)], timeout)
        prefix = PrefixStore("gloo", store)
        return cast(Group, dist.ProcessGroupGloo(prefix, group_rank, channel.world_size, timeout))
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"{_peer(channel, group_rank)} waited {channel.timeout_s:g} s at {channel.host}:{channel.port} for "
            f"{_absent(channel) or 'the others'} to join the channel"
        ) from error


def _absent(channel: GlooChannel) -> str:
    try:
        store = TCPStore(channel.host, channel.port, None, is_master=False, timeout=timedelta(seconds=1))
    except (RuntimeError, ValueError):
        return "its store"
    late = [rank for rank in range(channel.world_size) if not store.check([f"present/{rank}"])]
    return ", ".join(_peer(channel, rank) for rank in late)


def _peer(channel: GlooChannel, group_rank: int) -> str:
    sources = len(channel.source_ranks)
    if group_rank < sources:
        return f"trainer rank {channel.source_ranks[group_rank]}"
    return f"engine rank {group_rank - sources}"


class GlooSender:
    """A trainer rank's end for all engines it is attached to; satisfies `rollout.transports.base.Sender`."""

    def __init__(self, *, rank: int, timeout_s: float) -> None:
        """`rank` is the trainer rank; `timeout_s` bounds one publish, from `open` to the last `commit`."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._groups: dict[int, tuple[GlooChannel, Group]] = {}
        self._buckets: dict[int, Bucket] = {}
        self._payload = torch.empty(0, dtype=torch.uint8)
        self._version = WeightVersion(-1)

    def attach(self, engine_id: int, channel: GlooChannel) -> None:
        """Join the channel of one engine incarnation; the engine's earlier channel is left."""
        self.detach(engine_id)
        self._groups[engine_id] = (channel, _join(channel, channel.source_ranks.index(self._rank)))

    def detach(self, engine_id: int) -> None:
        """Leave an engine's channel."""
        self._groups.pop(engine_id, None)

    def open(self, weight_version: WeightVersion, buckets: Sequence[Bucket]) -> None:
        """Begin a publish; one buffer of the largest bucket's size is used for all."""
        self._version = weight_version
        self._deadline = time.monotonic() + self._timeout_s
        self._buckets = {bucket.index: bucket for bucket in buckets}
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        if self._payload.numel() < size:
            self._payload = torch.empty(size, dtype=torch.uint8)

    def buffer(self, index: int) -> memoryview:
        """Writable bytes of bucket `index`; the same memory for every bucket."""
        return self._payload.numpy().data[: self._buckets[index].num_bytes]

    def commit(self, index: int) -> None:
        """Seal a bucket and send it to every rank of every engine.

        Raises:
            RuntimeError: naming the engine ranks that did not take it: late, or gone. Their channel is left; the
                other engines have the bucket, and sending may go on for them.
        """
        seal(self.buffer(index), self._version)
        payload = self._payload[: self._buckets[index].num_bytes]
        works = [
            (engine_id, rank, _start(group.send, payload, len(channel.source_ranks) + rank, index))
            for engine_id, (channel, group) in self._groups.items()
            for rank in range(channel.num_engine_ranks)
        ]
        late = [(engine_id, rank) for engine_id, rank, work in works if not _done(work, self._deadline)]
        for engine_id, _ in late:
            self.detach(engine_id)
        if late:
            named = ", ".join(f"engine {engine_id} rank {rank}" for engine_id, rank in late)
            raise RuntimeError(
                f"trainer rank {self._rank} waited in vain ({self._timeout_s:g} s for a publish) for {named} to take "
                f"bucket {index} of weight version {self._version}"
            )

    def finish(self) -> str:
        """End the publish; there is nothing to find."""
        self._buckets = {}
        return ""

    def abandon(self) -> None:
        """End the publish."""
        self._buckets = {}


Transfer = Callable[[list[torch.Tensor], int, int], dist.Work]


def _start(transfer: Transfer, payload: torch.Tensor, peer: int, tag: int) -> dist.Work | None:
    try:
        return transfer([payload], peer, tag)
    except RuntimeError:  # the peer is gone
        return None


def _done(work: dist.Work | None, deadline: float) -> bool:
    if work is None:
        return False
    try:
        return bool(work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001))))
    except RuntimeError:  # gloo's word for a deadline that has passed and for a peer that is gone
        return False


class GlooInbox:
    """An engine rank's end; satisfies `rollout.transports.base.Inbox`. Buckets are taken in index order."""

    def __init__(self, channel: GlooChannel, *, engine_rank: int) -> None:
        self._channel = channel
        self._engine_rank = engine_rank
        self._group = _join(channel, len(channel.source_ranks) + engine_rank)
        self._version = WeightVersion(-1)
        self._timeout_s = self._deadline = 0.0

    def expect(self, weight_version: WeightVersion, *, timeout_s: float) -> None:
        """Begin a publish, all of which has to come within `timeout_s`."""
        self._version, self._timeout_s = weight_version, timeout_s
        self._deadline = time.monotonic() + timeout_s

    def take(self, bucket: Bucket) -> memoryview:
        """Receive one bucket into memory of its own and verify it."""
        payload = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        source = self._channel.source_ranks.index(bucket.source_rank)
        if not _done(_start(self._group.recv, payload, source, bucket.index), self._deadline):
            raise RuntimeError(
                f"engine rank {self._engine_rank} waited in vain ({self._timeout_s:g} s for a publish) for trainer "
                f"rank {bucket.source_rank} to send bucket {bucket.index} of weight version {self._version}"
            )
        view = payload.numpy().data
        verify(view, self._version, index=bucket.index)
        return view
