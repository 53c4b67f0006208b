"""The two ends of a transport: bytes of numbered buckets in, the same bytes out.

A transport knows buckets (index, source rank, size, weight version), never tensors. Two kinds exist:
*staged* ones (shared memory; later CUDA IPC) hold a whole publish where the engine can look at all of
it before anything is applied; *streaming* ones (gloo; later NCCL) deliver bucket after bucket in index
order. Everything above is written against these two protocols, so a new transport is one more file
and one more member of `Channel`.

Invariant: a bucket that `Inbox.take` returns has been verified against its trailer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.types import WeightVersion
from rollout.wire import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmChannel:
    """Engine and trainer share a node; a publish is one file per trainer rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooChannel:
    """A process group of the source trainer ranks followed by the engine's ranks, one per engine incarnation."""

    host: str
    port: int
    """Where the first source rank's store listens (see `rollout.transports.gloo.open_store`)."""
    source_ranks: tuple[int, ...]
    """Trainer ranks that send, in the order of their ranks in the group."""
    num_engine_ranks: int
    timeout_s: float
    """For joining the group."""

    @property
    def world_size(self) -> int:
        """Processes of the group."""
        return len(self.source_ranks) + self.num_engine_ranks


Channel = ShmChannel | GlooChannel
"""How one engine is reached; NCCL and CUDA IPC will be members of their own."""


class Sender(Protocol):
    """A trainer rank's end. One publish is `open`, then `buffer` and `commit` per bucket, then `finish`."""

    def open(self, weight_version: WeightVersion, buckets: Sequence[Bucket]) -> None:
        """Begin a publish of this rank's own buckets, given in index order."""
        ...

    def buffer(self, index: int) -> memoryview:
        """Writable bytes of bucket `index`, trailer included; valid until `commit(index)`."""
        ...

    def commit(self, index: int) -> None:
        """Write the trailer of a filled bucket and hand it over. Buckets are committed in index order."""
        ...

    def finish(self) -> str:
        """End the publish. Returns what the engines need to find it (a path), or an empty string."""
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

    def take(self, bucket: Bucket) -> memoryview:
        """Return the verified bytes of a bucket, waiting for them if need be.

        The bytes stay valid and unchanged as long as anything refers to them.

        Raises:
            RuntimeError: the bucket is late (naming the trainer rank), corrupt, or of another publish.
        """
        ...
