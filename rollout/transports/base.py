"""The two ends of a transport: bytes of numbered buckets in, the same bytes out.

A transport knows buckets (index, source rank, size, weight version), never tensors of a model. Bytes are uint8 tensors
on the device that holds them. There are two kinds. *Staged* transports (shared memory, CUDA IPC) hold a whole publish,
so an engine verifies it before it applies anything. *Streaming* transports (gloo, NCCL) deliver buckets in index order.
Callers use the `Sender` and `Inbox` protocols only: a new transport is one more file and one more member of `Channel`.

Invariant: a bucket that `Inbox.take` returns has been verified against its trailer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from rollout.types import WeightVersion
from rollout.weights.manifest import Bucket

if TYPE_CHECKING:  # controllers hold channels and do not import torch
    import torch


Backend = Literal["gloo", "nccl"]
"""Backend of a process group."""

Memory = Literal["shm", "cuda"]
"""Memory of a shared region: a file in shared memory, or the device itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmChannel:
    """Engine and trainer share a node; a publish is one file per trainer rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where a store listens (`rollout.transports.store_server`), and the secret that it asks for."""

    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChannel:
    """A process group of one engine incarnation: source ranks first, then the engine's ranks.

    Source ranks are trainer ranks, or ranks of another engine. An engine's rank forwards what it receives to the same
    rank of the next engine.
    """

    backend: Backend = "gloo"
    store: StoreAddress
    """The first source rank's store, at which the group meets."""
    source_ranks: tuple[int, ...]
    """Ranks that send, of the trainer or of `source_engine`, in the order of their ranks in the group."""
    source_engine: int | None = None
    """Number of the engine that forwards to this one; None where the trainer sends."""
    num_engine_ranks: int
    timeout_s: float
    """Limit for joining the group."""
    onward: "GroupChannel | None" = None
    """Channel to which the engine forwards what it receives."""

    @property
    def world_size(self) -> int:
        """Processes of the group."""
        return len(self.source_ranks) + self.num_engine_ranks

    @property
    def num_following(self) -> int:
        """Number of engines behind this channel's engine in the chain."""
        return 0 if self.onward is None else 1 + self.onward.num_following

    def peers(self, group_rank: int) -> Sequence[int]:
        """Ranks of the group that `group_rank` sends to, or receives from."""
        sources = len(self.source_ranks)
        if self.source_engine is not None:
            return [group_rank + sources if group_rank < sources else group_rank - sources]
        return range(sources, self.world_size) if group_rank < sources else range(sources)

    def source_of(self, bucket: Bucket, engine_rank: int) -> int:
        """The rank of the group that a rank of the engine receives a bucket from."""
        return self.source_ranks.index(bucket.source_rank) if self.source_engine is None else engine_rank

    def named(self, group_rank: int) -> str:
        """Name of a member of the group, for messages."""
        if group_rank >= len(self.source_ranks):
            return f"engine rank {group_rank - len(self.source_ranks)}"
        owner = "trainer" if self.source_engine is None else f"engine {self.source_engine}'s"
        return f"{owner} rank {self.source_ranks[group_rank]}"


def chain(
    stores: Mapping[int, StoreAddress],
    *,
    order: Sequence[int],
    source_ranks: tuple[int, ...],
    num_engine_ranks: int,
    timeout_s: float,
    backend: Backend = "gloo",
) -> dict[int, GroupChannel]:
    """Channels of a chain of engines, by engine number: the trainer sends to the first, each engine to the next.

    Args:
        stores: a store for each engine of the chain, by engine number.
        order: numbers of these engines, from the first of the chain to the last.
        source_ranks: trainer ranks that send.
        num_engine_ranks: number of ranks of each engine.
        timeout_s: limit for joining.
        backend: backend of all channels.
    """
    channels: dict[int, GroupChannel] = {}
    behind: GroupChannel | None = None
    for engine, before in reversed([*zip(order, (None, *order), strict=False)]):
        behind = channels[engine] = GroupChannel(
            backend=backend,
            store=stores[engine],
            source_ranks=source_ranks if before is None else tuple(range(num_engine_ranks)),
            source_engine=before,
            num_engine_ranks=num_engine_ranks,
            timeout_s=timeout_s,
            onward=behind,
        )
    return {engine: channels[engine] for engine in stores}


def side_by_side(nodes: Mapping[int, str]) -> list[int]:
    """Numbers of engines, ordered so that engines of one node are adjacent and a chain enters every node once.

    Args:
        nodes: the node of each engine, by engine number.
    """
    entered = list(nodes.values())
    return sorted(nodes, key=lambda engine: entered.index(nodes[engine]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedChannel:
    """Each engine rank maps a shared region that the trainer rank on its device has filled."""

    memory: Memory
    shared_with: tuple[tuple[int, ...], ...]
    """By engine rank: all engine ranks whose buckets are in its region, itself included."""


Channel = ShmChannel | GroupChannel | ColocatedChannel
"""How buckets reach one engine."""


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
        """Bytes that this rank wrote to shared memory or gave to sockets and links in the last publish.

        They are counted there: a bucket counts once for each of its receivers. If deltas travel, only they count.
        """
        ...

    @property
    def fault(self) -> str:
        """Why an engine did not receive the last publish, as far as this end knows; empty if nothing failed."""
        ...

    def abandon(self) -> None:
        """Drop the publish in progress, or the finished one that no engine needs any more."""
        ...


class Inbox(Protocol):
    """An engine rank's end during one publish."""

    def take(self, bucket: Bucket) -> "torch.Tensor":
        """Return the verified bytes of a bucket, uint8 [num_bytes]; waits for them if necessary.

        The bytes stay valid and unchanged as long as a tensor refers to them.

        Raises:
            RuntimeError: the bucket is late (naming the trainer rank), corrupt, or of another publish.
        """
        ...

    @property
    def received_bytes(self) -> int:
        """Bytes that came out of sockets, links or shared memory for this rank since the publish began."""
        ...


class AwaitedInbox(Inbox, Protocol):
    """An inbox that says when a publish can begin to be applied."""

    def arrived(self) -> bool:
        """Whether verified bytes are there: the whole publish if staged, the first bucket if streaming.

        Raises:
            RuntimeError: the bytes cannot arrive any more, are corrupt, or belong to another publish.
        """
        ...
