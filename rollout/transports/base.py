"""The two ends of a transport: bytes of numbered buckets in, the same bytes out.

A transport knows buckets (index, source rank, size, weight version), never tensors of a model; bytes are uint8 tensors
on the device where they lie. Two kinds exist: *staged* ones (shared memory, CUDA IPC) hold a whole publish where the
engine can look at all of it before anything is applied; *streaming* ones (gloo, NCCL) deliver bucket after bucket in
index order. Everything above is written against these two protocols, so a new transport is one more file and one more
member of `Channel`.

Invariant: a bucket that `Inbox.take` returns has been verified against its trailer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rollout.types import WeightVersion
from rollout.wire import Bucket

if TYPE_CHECKING:  # controllers hold channels, and have no torch
    import torch


Backend = Literal["gloo", "nccl"]
"""Of a process group."""

Memory = Literal["shm", "cuda"]
"""Where a segment lies: in a file in shared memory, or on the device itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmChannel:
    """Engine and trainer share a node; a publish is one file per trainer rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChannel:
    """A process group of the source trainer ranks followed by the engine's ranks, one per engine incarnation."""

    backend: Backend = "gloo"
    host: str
    port: int
    """Where the first source rank's store listens (see `rollout.transports.groups.open_store`)."""
    source_ranks: tuple[int, ...]
    """Trainer ranks that send, in the order of their ranks in the group."""
    num_engine_ranks: int
    timeout_s: float
    """For joining the group."""

    @property
    def world_size(self) -> int:
        """Processes of the group."""
        return len(self.source_ranks) + self.num_engine_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverChannel:
    """Each engine rank finds its share in a segment that the trainer rank on its device has laid down."""

    memory: Memory
    shared_with: tuple[tuple[int, ...], ...]
    """By engine rank: the engine ranks, itself among them, whose buckets lie in its segment."""


Channel = ShmChannel | GroupChannel | HandOverChannel
"""How one engine is reached."""


class Sender(Protocol):
    """A trainer rank's end. One publish is `open`, then `buffer` and `commit` per bucket, then `finish`."""

    def open(self, weight_version: WeightVersion, buckets: Sequence[Bucket]) -> None:
        """Begin a publish of this rank's own buckets, given in index order."""
        ...

    def buffer(self, index: int) -> "torch.Tensor":
        """Writable bytes of bucket `index`, trailer included, uint8 [num_bytes]; valid until `commit(index)`."""
        ...

    def commit(self, index: int) -> None:
        """Write the trailer of a filled bucket and hand it over. Buckets are committed in index order."""
        ...

    def finish(self) -> str:
        """End the publish. Returns what the engines need to find it (an address), or an empty string."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of the last publish as one engine takes them; fewer than its buckets have where deltas travel."""
        ...

    def abandon(self) -> None:
        """Drop the publish in progress, or the finished one that no engine needs any more."""
        ...


class Inbox(Protocol):
    """An engine rank's end during one publish."""

    def take(self, bucket: Bucket) -> "torch.Tensor":
        """Return the verified bytes of a bucket, uint8 [num_bytes], waiting for them if need be.

        The bytes stay valid and unchanged as long as anything refers to them.

        Raises:
            RuntimeError: the bucket is late (naming the trainer rank), corrupt, or of another publish.
        """
        ...
