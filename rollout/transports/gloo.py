"""Streaming transport over gloo: buckets go from trainer ranks to engine ranks in index order.

Each engine incarnation has a process group of its own: the source trainer ranks, then the engine's
ranks. The groups are made of bare `ProcessGroupGloo` objects over a store of their own, so neither
Megatron's nor vLLM's default group notices. A bucket goes to the ranks of every attached engine that
want it (`Bucket.engine_ranks`).

gloo cannot go on after a deadline has passed: the connection is closed. A channel on which somebody
was late is dead, and a new one has to be made (`Engine.init_transport`, `GlooSender.attach`).

A bucket is a header and a body: all of it, or what has changed since the receiver's last one
(`rollout.transports.delta`). Sender and receiver know the weight version of every bucket they keep, so a
receiver that is new, or that missed something, gets whole ones.

Invariant: the tag of a message follows from its bucket's index, so a bucket is never taken for another.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rollout.transports.base import GlooChannel
from rollout.transports.delta import HEADER, Kind, Message, apply, encode
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


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A bucket on its way."""

    index: int
    works: list[tuple[int, int, dist.Work | None]] = field(default_factory=list)
    """Engine, rank and what to wait for."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Kept until they have been sent."""


class GlooSender:
    """A trainer rank's end for all engines it is attached to; satisfies `rollout.transports.base.Sender`."""

    def __init__(self, *, rank: int, timeout_s: float, delta: bool = False, full_every: int = 0) -> None:
        """A sender without engines.

        Args:
            rank: the trainer rank.
            timeout_s: bounds one publish, from `open` to the last `commit`.
            delta: keep what was sent, and send what has changed.
            full_every: every so many publishes all travels whole; 0 for never again.
        """
        self._rank = rank
        self._timeout_s = timeout_s
        self._delta, self._full_every = delta, full_every
        self._num_publishes = 0
        self._baselines: dict[int, tuple[WeightVersion, torch.Tensor]] = {}
        self._kept: dict[tuple[int, int], WeightVersion] = {}
        """Weight version of the bucket that an engine keeps, by engine and bucket."""
        self.sent_bytes = 0
        self._deadline = 0.0
        self._groups: dict[int, tuple[GlooChannel, Group]] = {}
        self._buckets: dict[int, Bucket] = {}
        self._payloads = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._flights: list[_Flight] = []
        self._version = WeightVersion(-1)

    def attach(self, engine_id: int, channel: GlooChannel) -> None:
        """Join the channel of one engine incarnation; the engine's earlier channel is left."""
        self.detach(engine_id)
        self._groups[engine_id] = (channel, _join(channel, channel.source_ranks.index(self._rank)))

    def detach(self, engine_id: int) -> None:
        """Leave an engine's channel."""
        self._groups.pop(engine_id, None)
        self._kept = {key: version for key, version in self._kept.items() if key[0] != engine_id}

    def open(self, weight_version: WeightVersion, buckets: Sequence[Bucket]) -> None:
        """Begin a publish; two buffers of the largest bucket's size are used in turns."""
        self._version = weight_version
        self._deadline = time.monotonic() + self._timeout_s
        self._buckets = {bucket.index: bucket for bucket in buckets}
        if self._full_every and self._num_publishes % self._full_every == 0:
            self._baselines = {}
        self._num_publishes += 1
        self.sent_bytes = 0
        self._flights = []
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        if self._payloads[0].numel() < size:
            self._payloads = [torch.empty(size, dtype=torch.uint8) for _ in self._payloads]

    def buffer(self, index: int) -> memoryview:
        """Writable bytes of bucket `index`; the memory of the bucket before the last one."""
        return self._payload(index).numpy().data

    def _payload(self, index: int) -> torch.Tensor:
        turn = list(self._buckets).index(index) % len(self._payloads)
        return self._payloads[turn][: self._buckets[index].num_bytes]

    def commit(self, index: int) -> None:
        """Seal a bucket and begin to send it to the ranks of every engine that want it; the last one has arrived then.

        Raises:
            RuntimeError: naming the engine ranks that did not take the last one: late, or gone. Their channel is left;
                the other engines have it, and sending may go on for them.
        """
        seal(self.buffer(index), self._version)
        payload = self._payload(index)
        base_version, change = self._change(index, payload)
        whole = Message(kind=Kind.WHOLE, body=payload, num_changed=payload.numel())
        flight = _Flight(index=index)
        for engine_id, (channel, group) in self._groups.items():
            lined_up = change is not None and self._kept.get((engine_id, index)) == base_version
            message = change if change is not None and lined_up else whole
            header = message.header(base_version if lined_up else -1, keep=self._delta)
            parts = torch.frombuffer(bytearray(header), dtype=torch.uint8), message.body
            flight.tensors += parts
            for rank in range(channel.num_engine_ranks):
                if self._buckets[index].wanted_by(rank):
                    peer = len(channel.source_ranks) + rank
                    for part, tag in zip(parts, _tags(index), strict=True):
                        if part.numel():
                            flight.works.append((engine_id, rank, _start(group.send, part, peer, tag)))
        self.sent_bytes += HEADER.size + (change or whole).body.numel()
        if self._delta:
            self._baselines[index] = self._version, payload.clone()
        self._flights.append(flight)
        if len(self._flights) == len(self._payloads):
            self._land()

    def _land(self) -> None:
        """Wait until the oldest bucket under way has arrived."""
        flight = self._flights.pop(0)
        late = sorted({(engine_id, rank) for engine_id, rank, work in flight.works if not _done(work, self._deadline)})
        for engine_id, _ in late:
            self.detach(engine_id)
        if self._delta:
            self._kept |= {(engine_id, flight.index): self._version for engine_id in self._groups}
        if late:
            named = ", ".join(f"engine {engine_id} rank {rank}" for engine_id, rank in late)
            raise RuntimeError(
                f"trainer rank {self._rank} waited in vain ({self._timeout_s:g} s for a publish) for {named} to take "
                f"bucket {flight.index} of weight version {self._version}"
            )

    def _change(self, index: int, payload: torch.Tensor) -> tuple[WeightVersion, Message | None]:
        """What has changed in a bucket, and since which version; nothing where its last bytes are not known."""
        if index not in self._baselines or self._baselines[index][1].numel() != payload.numel():
            return WeightVersion(-1), None
        version, baseline = self._baselines[index]
        return version, encode(baseline, payload)

    def finish(self) -> str:
        """Wait for the last bucket to arrive; there is nothing to find.

        Raises:
            RuntimeError: as `commit` does.
        """
        while self._flights:
            self._land()
        self._buckets = {}
        return ""

    def abandon(self) -> None:
        """End the publish."""
        self._buckets, self._flights = {}, []


def _tags(index: int) -> tuple[int, int]:
    """Of a bucket's header and body."""
    return 2 * index, 2 * index + 1


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
        self._baselines: dict[int, tuple[WeightVersion, torch.Tensor]] = {}

    def expect(self, weight_version: WeightVersion, *, timeout_s: float) -> None:
        """Begin a publish, all of which has to come within `timeout_s`."""
        self._version, self._timeout_s = weight_version, timeout_s
        self._deadline = time.monotonic() + timeout_s

    def take(self, bucket: Bucket) -> memoryview:
        """Receive one bucket into memory of its own and verify it."""
        header_tag, body_tag = _tags(bucket.index)
        header = self._receive(bucket, HEADER.size, header_tag)
        kind, keep, base_version, num_bytes, num_changed = HEADER.unpack(header.numpy().tobytes())
        if kind not in tuple(Kind) or not 0 <= num_changed <= num_bytes <= bucket.num_bytes:
            raise RuntimeError(
                f"bucket {bucket.index}: the header is corrupt, or not that of a bucket of {bucket.num_bytes}"
            )
        message = Message(kind=Kind(kind), body=self._receive(bucket, num_bytes, body_tag), num_changed=num_changed)
        payload = self._whole(bucket, message, base_version)
        view = payload.numpy().data
        verify(view, self._version, index=bucket.index)
        if keep:
            self._baselines[bucket.index] = self._version, payload
        return view

    def _receive(self, bucket: Bucket, num_bytes: int, tag: int) -> torch.Tensor:
        found = torch.empty(num_bytes, dtype=torch.uint8)
        source = self._channel.source_ranks.index(bucket.source_rank)
        if num_bytes and not _done(_start(self._group.recv, found, source, tag), self._deadline):
            raise RuntimeError(
                f"engine rank {self._engine_rank} waited in vain ({self._timeout_s:g} s for a publish) for trainer "
                f"rank {bucket.source_rank} to send bucket {bucket.index} of weight version {self._version}"
            )
        return found

    def _whole(self, bucket: Bucket, message: Message, base_version: int) -> torch.Tensor:
        if message.kind is Kind.WHOLE:
            if message.body.numel() != bucket.num_bytes:
                raise RuntimeError(
                    f"bucket {bucket.index}: {message.body.numel()} bytes came, the manifest says {bucket.num_bytes}"
                )
            return message.body
        version, baseline = self._baselines.get(bucket.index, (None, None))
        if baseline is None or version != base_version:
            raise RuntimeError(
                f"bucket {bucket.index}: what has changed since weight version {base_version} came, but "
                f"{'none' if version is None else version} is kept here"
            )
        return apply(message, baseline)
