"""Staged transport of colocated engines: trainer ranks exchange buckets, and engine ranks map them on their device.

Two processes on one device cannot share an NCCL communicator, and an engine rank that sees one device cannot map
another device's memory. So trainer ranks exchange whole buckets over their own process group. Each trainer rank writes
every bucket that an engine rank on its device requires into one region, and those engine ranks map it. The region is
memory of the device (CUDA IPC), or a file in shared memory if there is no device. A rank applies nothing before all its
buckets are verified. Over several nodes a bucket enters each node once, and one rank there passes it on
(`rollout.transports.node_routes`).

Invariants: all ranks enter every publish, also ranks without buckets to send. Each rank starts its sends, receives and
forwards in the order of bucket indices. So both ranks of a pair have the same order of transfers, and no transfer waits
for a later one. A region holds the buckets that its engine ranks require, in index order, laid out by `bucket_offsets`.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from rollout.failures import DeadlineError
from rollout.transports.base import Backend
from rollout.transports.checksum import seal, verify
from rollout.transports.deadline import Deadline
from rollout.transports.node_routes import givers, shared_buckets
from rollout.transports.rendezvous import Group, done, start_recv, start_send
from rollout.transports.shm_files import SegmentFile, bucket_offsets, map_segment
from rollout.types import WeightVersion
from rollout.weights.manifest import Bucket, WeightManifest


class SharedRegion(Protocol):
    """Memory of one publish that engine ranks on the same device can map."""

    device: torch.device

    def reserve(self, weight_version: WeightVersion, num_bytes: int) -> torch.Tensor:
        """Writable memory, uint8 [num_bytes]."""
        ...

    def show(self) -> str:
        """Make the region visible to other processes; returns its address."""
        ...

    def remove(self) -> None:
        """Release the memory, which no process reads any more."""
        ...


class ShmRegion:
    """A region in shared memory; satisfies `SharedRegion`."""

    device = torch.device("cpu")

    def __init__(self, *, run_id: str, rank: int) -> None:
        self._file = SegmentFile(run_id=run_id, rank=rank)

    def reserve(self, weight_version: WeightVersion, num_bytes: int) -> torch.Tensor:
        """See `SegmentFile.reserve`."""
        return torch.frombuffer(self._file.reserve(weight_version, num_bytes), dtype=torch.uint8)

    def show(self) -> str:
        """See `SegmentFile.show`."""
        return self._file.show()

    def remove(self) -> None:
        """See `SegmentFile.remove`."""
        self._file.remove()


class ColocatedSender:
    """A trainer rank's end; satisfies `rollout.transports.base.Sender`."""

    def __init__(
        self,
        region: SharedRegion,
        group: Group | None,
        *,
        run_id: str,
        rank: int,
        hosted: Sequence[Sequence[int]],
        buckets: Sequence[Bucket],
        backend: Backend,
        timeout_s: float,
        nodes: Sequence[str] = (),
    ) -> None:
        """A sender that takes part in every publish of a plan.

        Args:
            region: memory for the buckets of the engine ranks on this rank's device.
            group: process group of all trainer ranks, in order of rank; None for a single rank.
            run_id: run whose weights these are.
            rank: number of this trainer rank.
            hosted: by trainer rank, the numbers of the engine ranks on its device.
            buckets: all buckets of the plan, from every source rank.
            backend: backend of `group`.
            timeout_s: limit of one publish.
            nodes: node of each trainer rank; empty if all share one.
        """
        self._region = region
        self._group = group
        self._run_id = run_id
        self._rank = rank
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        self._hosted_here = bool(hosted[rank])
        self._shared = shared_buckets(buckets, hosted[rank])
        self._offsets, self._size = bucket_offsets(self._shared)
        routes = {bucket.index: givers(bucket, hosted, nodes or ("",) * len(hosted)) for bucket in buckets}
        self._receivers = {
            index: [receiver for receiver, giver in route.items() if giver == rank] for index, route in routes.items()
        }
        """By bucket: ranks that this rank sends or forwards it to."""
        self._giver = {index: route[rank] for index, route in routes.items() if rank in route}
        self._buckets: dict[int, Bucket] = {}
        self._memory: torch.Tensor | None = None
        self._spare: list[torch.Tensor] = []
        """Two buffers for buckets that no engine rank on this device requires."""
        self._turns: dict[int, int] = {}
        self._sending: dict[int, list[tuple[int, dist.Work | None]]] = {}
        """By bucket: receiving rank and pending transfer."""
        self._expected: deque[Bucket] = deque()
        self._receiving: list[tuple[Bucket, dist.Work | None]] = []
        self._version = WeightVersion(-1)
        self._sent_bytes = 0
        self._deadline = Deadline(0.0)

    def open(self, weight_version: WeightVersion, buckets: Sequence[Bucket]) -> None:
        """Reserve the region, and two buffers for buckets that only other devices require."""
        self.abandon()
        self._version = weight_version
        self._sent_bytes = 0
        self._deadline = Deadline(self._timeout_s)
        self._buckets = {bucket.index: bucket for bucket in buckets}
        if self._hosted_here:
            self._memory = self._region.reserve(weight_version, max(self._size, 1))
        passing = [bucket for bucket in buckets if bucket.index not in self._offsets]
        self._turns = {bucket.index: turn % 2 for turn, bucket in enumerate(passing)}
        largest = max((bucket.num_bytes for bucket in passing), default=0)
        self._spare = [torch.empty(largest, dtype=torch.uint8, device=self._region.device) for _ in range(2)]
        self._expected = deque(bucket for bucket in self._shared if bucket.source_rank != self._rank)

    def buffer(self, index: int) -> torch.Tensor:
        """Writable bytes of bucket `index`: its place in the region, or a buffer that an earlier bucket has released.

        Raises:
            RuntimeError: naming the trainer rank that did not receive the earlier bucket in time.
        """
        bucket = self._buckets[index]
        if index in self._offsets:
            return self._place(bucket)
        turn = self._turns[index]
        for earlier in [sent for sent in self._sending if sent < index and self._turns.get(sent) == turn]:
            self._await_sent(earlier)
        return self._spare[turn][: bucket.num_bytes]

    def _place(self, bucket: Bucket) -> torch.Tensor:
        assert self._memory is not None, "open() comes first"
        start = self._offsets[bucket.index]
        return self._memory[start : start + bucket.num_bytes]

    def commit(self, index: int) -> None:
        """Seal a bucket and start to send it to the other trainer ranks whose engine ranks require it."""
        bucket = self._buckets[index]
        payload = self._place(bucket) if index in self._offsets else self._spare[self._turns[index]][: bucket.num_bytes]
        self._sent_bytes += payload.numel() if index in self._offsets else 0
        seal(payload, self._version, run_id=self._run_id, index=index)
        self._receive_before(index)
        self._send(index, payload)

    def _send(self, index: int, payload: torch.Tensor) -> None:
        if self._group is not None and self._receivers[index]:
            self._sending[index] = [
                (other, start_send(self._group, payload, other, index)) for other in self._receivers[index]
            ]
            self._sent_bytes += payload.numel() * len(self._receivers[index])

    def _receive_before(self, index: int | None) -> None:
        """Start to receive all buckets before `index` in the common order; all remaining buckets for None.

        Waits for each bucket that this rank forwards, and forwards it before the next one.
        """
        while self._expected and (index is None or self._expected[0].index < index):
            bucket = self._expected.popleft()
            assert self._group is not None, "buckets of other ranks need a group"
            work = start_recv(self._group, self._place(bucket), self._giver[bucket.index], bucket.index)
            if self._receivers[bucket.index]:
                self._await_received(bucket, work)
                self._send(bucket.index, self._place(bucket))
            else:
                self._receiving.append((bucket, work))

    def _await_received(self, bucket: Bucket, work: dist.Work | None) -> None:
        if not self._done(work):
            self._late(f"rank {self._giver[bucket.index]} to send bucket {bucket.index}")

    def _done(self, work: dist.Work | None) -> bool:
        assert self._group is not None, "buckets of other ranks need a group"
        return done(work, self._group, self._deadline, self._backend)

    def _await_sent(self, index: int) -> None:
        for other, work in self._sending.pop(index):
            if not self._done(work):
                self._late(f"rank {other} to take bucket {index}")

    def _late(self, peer: str) -> None:
        raise DeadlineError(
            f"trainer rank {self._rank} waited in vain ({self._timeout_s:g} s for a publish) for trainer {peer} of "
            f"weight version {self._version}"
        )

    def finish(self) -> str:
        """Wait until all buckets are received and sent; show the region and return its address.

        Raises:
            RuntimeError: naming the trainer rank that is late or has ended.
        """
        self._receive_before(None)
        for bucket, work in self._receiving:
            self._await_received(bucket, work)
        for index in list(self._sending):
            self._await_sent(index)
        self._receiving, self._spare = [], []
        return self._region.show() if self._hosted_here else ""

    @property
    def sent_bytes(self) -> int:
        """Bytes of own buckets written to the region, and of all buckets that were sent or passed on."""
        return self._sent_bytes

    @property
    def fault(self) -> str:
        """Empty: engines fetch what is shown, and report their own failures."""
        return ""

    def abandon(self) -> None:
        """Release the region, finished or not."""
        self._memory = None
        self._spare, self._receiving, self._sending = [], [], {}
        self._expected.clear()
        self._region.remove()


class ColocatedInbox:
    """An engine rank's end: a mapped region whose required buckets are verified; satisfies `AwaitedInbox`."""

    def __init__(
        self, manifest: WeightManifest, memory: torch.Tensor, *, engine_rank: int, shared_with: Sequence[int]
    ) -> None:
        """Verify the buckets that `engine_rank` requires.

        Args:
            manifest: manifest of the publish.
            memory: memory of the region, uint8.
            engine_rank: engine rank that reads the region.
            shared_with: all engine ranks whose buckets lie in the region, this one included.

        Raises:
            RuntimeError: the region has another size than the manifest says, or a bucket is corrupt.
        """
        shared = shared_buckets(manifest.buckets, shared_with)
        self._offsets, size = bucket_offsets(shared)
        if memory.numel() != max(size, 1):
            raise RuntimeError(
                f"the region of engine rank {engine_rank} has {memory.numel()} bytes, the manifest says {size}"
            )
        self._memory = memory
        self.received_bytes = 0
        for bucket in shared:
            if bucket.required_by(engine_rank):
                verify(self._bytes(bucket), manifest.weight_version, run_id=manifest.run_id, index=bucket.index)

    def arrived(self) -> bool:
        """True: all buckets were verified when the inbox was made."""
        return True

    def take(self, bucket: Bucket) -> torch.Tensor:
        """The bytes of a bucket, verified when the inbox was made."""
        self.received_bytes += bucket.num_bytes
        return self._bytes(bucket)

    def _bytes(self, bucket: Bucket) -> torch.Tensor:
        start = self._offsets[bucket.index]
        return self._memory[start : start + bucket.num_bytes]


def map_shm(manifest: WeightManifest, address: str, *, engine_rank: int, shared_with: Sequence[int]) -> torch.Tensor:
    """Map a `ShmRegion`: its memory as uint8."""
    _, size = bucket_offsets(shared_buckets(manifest.buckets, shared_with))
    return torch.frombuffer(map_segment(engine_rank, address, size, manifest.weight_version), dtype=torch.uint8)
