"""Streaming transport over a process group, gloo or NCCL: buckets go from trainer ranks to engine ranks in index order.

Each engine incarnation has its own process group (`rollout.transports.rendezvous`): source ranks, then engine ranks.
A bucket is sent to the ranks of every attached engine that require it (`Bucket.engine_ranks`). Engines form a chain:
trainer ranks send to the first engine, and every rank forwards what it receives to the same rank of the next engine
(`Relay`) while it goes on receiving. So no rank sends a bucket twice. With NCCL buckets stay on devices.

No backend can continue after a missed deadline. The channel is then closed, and a new one has to be made
(`EngineWeights.init_transport`, `GroupSender.attach`).

A message is a header and a body: the whole bucket, or its changes since the receiver's last one
(`rollout.transports.delta`). Sender and receiver know the weight version of every bucket they keep, so a
receiver that is new, or that missed a publish, gets whole buckets. Every engine rank keeps its own buckets.

Invariants: both ends of a pair of ranks transfer buckets in index order, and each body right after its header. With
gloo the tag of a message also names its bucket, so a bucket is never mistaken for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rollout.failures import DeadlineError
from rollout.transports.base import Backend, GroupChannel
from rollout.transports.checksum import seal, verify
from rollout.transports.deadline import Deadline
from rollout.transports.delta import HEADER, Kind, Message, apply, encode
from rollout.transports.rendezvous import Group, device_of, done, join, leave, start_recv, start_send
from rollout.types import WeightVersion
from rollout.weights.manifest import Bucket, WeightManifest


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A bucket that is being sent."""

    index: int
    works: list[tuple[int, int, Group, dist.Work | None]] = field(default_factory=list)
    """Engine, engine rank, their group and pending transfer."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Tensors that must stay in memory until they are sent."""


class GroupSender:
    """A trainer rank's end for all engines it is attached to; satisfies `rollout.transports.base.Sender`."""

    def __init__(
        self,
        *,
        run_id: str,
        rank: int,
        timeout_s: float,
        backend: Backend = "gloo",
        delta: bool = False,
        full_every: int = 0,
    ) -> None:
        """Make a sender without engines.

        Args:
            run_id: run whose weights these are.
            rank: number of the trainer rank.
            backend: backend of all channels that will be attached.
            timeout_s: limit of one publish, from `open` to the last `commit`.
            delta: keep sent buckets, and send only changed bytes.
            full_every: one in this many publishes sends whole buckets; 0 for the first publish only.
        """
        self._run_id = run_id
        self._rank = rank
        self._backend: Backend = backend
        self._device = device_of(backend)
        self._timeout_s = timeout_s
        self._delta, self._full_every = delta, full_every
        self._num_publishes = 0
        self._baselines: dict[int, tuple[WeightVersion, torch.Tensor]] = {}
        self._engine_versions: dict[tuple[int, int], WeightVersion] = {}
        """By engine and bucket: weight version of the bytes that the engine keeps."""
        self.sent_bytes = 0
        self._deadline = Deadline(0.0)
        self._groups: dict[int, tuple[GroupChannel, Group]] = {}
        self._buckets: dict[int, Bucket] = {}
        self._payloads = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._flights: list[_Flight] = []
        self._version = WeightVersion(-1)
        self.fault = ""

    def attach(self, engine_id: int, channel: GroupChannel) -> None:
        """Join the channel of one engine incarnation, after leaving the engine's earlier channel."""
        self.detach(engine_id)
        self._groups[engine_id] = (channel, join(channel, channel.source_ranks.index(self._rank)))

    def detach(self, engine_id: int) -> None:
        """Leave an engine's channel."""
        _, group = self._groups.pop(engine_id, (None, None))
        if group is not None:
            leave(group, self._backend)
        self._engine_versions = {key: version for key, version in self._engine_versions.items() if key[0] != engine_id}

    def open(self, weight_version: WeightVersion, buckets: Sequence[Bucket]) -> None:
        """Begin a publish. Buckets alternate between two buffers of the largest bucket's size."""
        self._version = weight_version
        self._deadline = Deadline(self._timeout_s)
        self._buckets = {bucket.index: bucket for bucket in buckets}
        if self._full_every and self._num_publishes % self._full_every == 0:
            self._baselines = {}
        self._num_publishes += 1
        self.sent_bytes = 0
        self.fault = ""
        self._flights = []
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        if self._payloads[0].numel() < size:
            self._payloads = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in self._payloads]

    def buffer(self, index: int) -> torch.Tensor:
        """Writable bytes of bucket `index`, in the buffer of the last bucket but one."""
        turn = list(self._buckets).index(index) % len(self._payloads)
        return self._payloads[turn][: self._buckets[index].num_bytes]

    def commit(self, index: int) -> None:
        """Seal a bucket and start to send it to every engine's ranks that require it; the last bucket has arrived then.

        If engine ranks did not receive the last bucket in time, or have ended, `fault` names them, and their channel is
        left. That is no error of this rank, whose peers would lose the trainer by it.
        """
        payload = self.buffer(index)
        seal(payload, self._version, run_id=self._run_id, index=index)
        base_version, change = self._change(index, payload)
        whole = Message(kind=Kind.WHOLE, body=payload, num_changed=payload.numel())
        flight = _Flight(index=index)
        for engine_id, (channel, group) in self._groups.items():
            has_baseline = change is not None and self._engine_versions.get((engine_id, index)) == base_version
            message = change if change is not None and has_baseline else whole
            header = message.header(base_version if has_baseline else -1, keep=self._delta)
            tensors = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self._device), message.body
            flight.tensors += tensors
            for rank in range(channel.num_engine_ranks):
                if self._buckets[index].required_by(rank):
                    peer = len(channel.source_ranks) + rank
                    for tensor, tag in zip(tensors, _tags(index), strict=True):
                        if tensor.numel():
                            flight.works.append((engine_id, rank, group, start_send(group, tensor, peer, tag)))
                            self.sent_bytes += tensor.numel()
        if self._delta:
            baseline = torch.empty_like(payload) if change is None else self._baselines[index][1]
            self._baselines[index] = self._version, baseline.copy_(payload)
        self._flights.append(flight)
        if len(self._flights) == len(self._payloads):
            self._await_oldest()

    def _await_oldest(self) -> None:
        """Wait until the oldest bucket in transfer has arrived."""
        flight = self._flights.pop(0)
        late = sorted({(engine, rank) for engine, rank, group, work in flight.works if not self._done(work, group)})
        for engine_id, _ in late:
            self.detach(engine_id)
        if self._delta:
            self._engine_versions |= {(engine_id, flight.index): self._version for engine_id in self._groups}
        if late and not self.fault:
            named = ", ".join(f"engine {engine_id} rank {rank}" for engine_id, rank in late)
            self.fault = (
                f"trainer rank {self._rank} waited in vain ({self._timeout_s:g} s for a publish) for {named} to take "
                f"bucket {flight.index} of weight version {self._version}"
            )

    def _done(self, work: dist.Work | None, group: Group) -> bool:
        return done(work, group, self._deadline, self._backend)

    def _change(self, index: int, payload: torch.Tensor) -> tuple[WeightVersion, Message | None]:
        """Version of a bucket's baseline, and the change since then; -1 and None without a baseline of equal size."""
        if index not in self._baselines or self._baselines[index][1].numel() != payload.numel():
            return WeightVersion(-1), None
        version, baseline = self._baselines[index]
        return version, encode(baseline, payload)

    def finish(self) -> str:
        """Wait for the last bucket to arrive; returns an empty address."""
        while self._flights:
            self._await_oldest()
        self._buckets = {}
        return ""

    def abandon(self) -> None:
        """Drop the publish in progress."""
        self._buckets, self._flights = {}, []


def _tags(index: int) -> tuple[int, int]:
    """Tags of a bucket's header and body."""
    return 2 * index, 2 * index + 1


class Relay:
    """Forwards the buckets that one engine rank receives to the same rank of the next engine.

    If the next engine does not take a bucket in time, the relay stops sending and this engine continues; the next
    engine reports its own timeout. With n engines behind it, a relay waits n / (n + 1) of the publish's time. So when
    one engine of a chain hangs, only its predecessor's relay times out, and earlier relays have time left.
    """

    def __init__(self, channel: GroupChannel, *, engine_rank: int) -> None:
        """Join the channel of the next engine."""
        behind = channel.num_following + 1
        self._patience = behind / (behind + 1)
        self._deadline = Deadline(0.0)
        self._backend: Backend = channel.backend
        self._group: Group | None = join(channel, engine_rank)
        self._peer = len(channel.source_ranks) + engine_rank
        self._flights: list[list[tuple[torch.Tensor, dist.Work | None]]] = []

    def expect(self, timeout_s: float) -> None:
        """Begin a publish with this limit; the last publish has been forwarded then."""
        self._await_all_but(0)
        self._deadline = Deadline(self._patience * timeout_s)

    def forward(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send a bucket's header and body; the last bucket but one has arrived then."""
        if self._group is None:
            return
        self._flights.append(
            [
                (tensor, start_send(self._group, tensor, self._peer, tag))
                for tensor, tag in zip(tensors, _tags(index), strict=True)
                if tensor.numel()
            ]
        )
        self._await_all_but(1)

    def _await_all_but(self, most: int) -> None:
        """Wait until at most `most` buckets are in transfer."""
        while self._group is not None and len(self._flights) > most:
            group = self._group
            if not all(done(work, group, self._deadline, self._backend) for _, work in self._flights.pop(0)):
                self.close()

    def close(self) -> None:
        """Send nothing more."""
        if self._group is not None:
            leave(self._group, self._backend)
        self._group, self._flights = None, []


class GroupInbox:
    """An engine rank's end; satisfies `rollout.transports.base.Inbox`. Buckets are taken in index order."""

    def __init__(self, channel: GroupChannel, *, engine_rank: int) -> None:
        self._channel = channel
        self._engine_rank = engine_rank
        self._group = join(channel, len(channel.source_ranks) + engine_rank)
        self._device = device_of(channel.backend)
        self._run_id, self._version = "", WeightVersion(-1)
        self._timeout_s, self._deadline = 0.0, Deadline(0.0)
        self._baselines: dict[int, tuple[WeightVersion, torch.Tensor]] = {}
        self.received_bytes = 0
        self._relay: Relay | None = None
        if channel.onward is not None:
            self._relay = Relay(channel.onward, engine_rank=engine_rank)

    def expect(self, manifest: WeightManifest, *, timeout_s: float) -> None:
        """Begin the publish of a manifest, which has to arrive completely within `timeout_s`."""
        if self._relay is not None:
            self._relay.expect(timeout_s)
        self._run_id, self._version, self._timeout_s = manifest.run_id, manifest.weight_version, timeout_s
        self._deadline = Deadline(timeout_s)
        self.received_bytes = 0

    def take(self, bucket: Bucket) -> torch.Tensor:
        """Receive one bucket into new memory and verify it; may be called in any thread."""
        if self._device.type == "cpu":
            return self._take(bucket)
        with torch.cuda.device(self._device):  # the current device of a new thread is the first
            return self._take(bucket)

    def close(self) -> None:
        """Leave the channel, and the channel to the next engine."""
        leave(self._group, self._channel.backend)
        if self._relay is not None:
            self._relay.close()

    def _take(self, bucket: Bucket) -> torch.Tensor:
        header_tag, body_tag = _tags(bucket.index)
        header = self._receive(bucket, HEADER.size, header_tag)
        kind, keep, base_version, num_bytes, num_changed = HEADER.unpack(header.cpu().numpy().tobytes())
        if kind not in tuple(Kind) or not 0 <= num_changed <= num_bytes <= bucket.num_bytes:
            raise RuntimeError(
                f"bucket {bucket.index}: the header is corrupt, or not that of a bucket of {bucket.num_bytes}"
            )
        body = self._receive(bucket, num_bytes, body_tag)
        message = Message(kind=Kind(kind), body=body, num_changed=num_changed)
        if self._relay is not None:
            self._relay.forward(bucket.index, (header, body))
        payload = self._whole(bucket, message, base_version)
        verify(payload, self._version, run_id=self._run_id, index=bucket.index)
        if keep:
            self._baselines[bucket.index] = self._version, payload
        return payload

    def _receive(self, bucket: Bucket, num_bytes: int, tag: int) -> torch.Tensor:
        received = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        source = self._channel.source_of(bucket, self._engine_rank)
        group, backend = self._group, self._channel.backend
        if num_bytes and not done(start_recv(group, received, source, tag), group, self._deadline, backend):
            raise DeadlineError(
                f"engine rank {self._engine_rank} waited in vain ({self._timeout_s:g} s for a publish) for "
                f"{self._channel.named(source)} to send bucket {bucket.index} of weight version {self._version}"
            )
        self.received_bytes += num_bytes
        return received

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
                f"bucket {bucket.index}: a delta on weight version {base_version} came, but this rank keeps "
                f"{'none' if version is None else f'version {version}'}"
            )
        return apply(message, baseline)
