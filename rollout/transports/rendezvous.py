"""Process groups of transports: joining them, and waiting for transfers until a deadline.

Groups are bare `ProcessGroupGloo` and `ProcessGroupNCCL` objects over their own store, apart from the default groups of
Megatron and vLLM. All differences between the two backends are in this file:

* gloo cannot be polled, and closes all connections of a group when the limit of one wait has passed. Its clock goes on
  while this process is stopped. So its waits have no limit, and run in threads of their own, which a missed deadline
  leaves behind: closing the connections does not end the wait for a payload of which a part has come.
* NCCL transfers are polled, and the group is aborted (`leave`) after a missed deadline, or after an error such as the
  death of a peer.
* torch has a watchdog for each NCCL group. It would end this process because a peer has died. So groups of transports
  have none (`_without_watchdog`).
* NCCL creates a communicator at the first transfer between two ranks, and the transfer blocks until both have started
  it. So ranks create communicators when they join. NCCL has no tags, so both ends start the transfers of a pair in the
  same order.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from history.patience import NEVER, AwakeClock
from rollout.failures import DeadlineError, brief
from rollout.transports.base import Backend, GroupChannel
from rollout.transports.deadline import Deadline
from rollout.transports.secret_store import SecretStore
from rollout.transports.store_server import listen

POLL_S = 0.0002
MEET_TAG = 1 << 30
"""Tag that no bucket uses."""
_AT_ONCE = timedelta(milliseconds=1)
"""Limit of a wait for what should be there."""
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
"""Variable that torch reads when it makes an NCCL group. With 1 it starts no watchdog: `done` finds all errors."""


class Group(Protocol):
    """The calls of a process group that transports use."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Begin to send to a rank."""
        ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Begin to receive from a rank."""
        ...

    def rank(self) -> int:
        """Number of this process in the group."""
        ...

    def size(self) -> int:
        """Processes of the group."""
        ...


def open_store(*, host: str, timeout_s: float) -> TCPStore:
    """Open torch's own store on a free port of this node's address `host`, and on no other; its `port` says which.

    Trainer ranks meet at it. It asks for no secret. Threads of NCCL use the store of a trainer's groups as long as the
    groups exist, so it must not need the interpreter. The caller keeps it while groups that meet there exist.
    """
    listening = listen(host)  # torch's own would listen on all addresses
    port, timeout = listening.getsockname()[1], timedelta(seconds=timeout_s)
    return TCPStore(
        host, port, None, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


_stores: "WeakKeyDictionary[Group, SecretStore]" = WeakKeyDictionary()
"""The store of each group of this process: a group itself keeps the C++ half of its store only."""


def device_of(backend: Backend) -> torch.device:
    """Device on which a backend holds bytes in this process."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def join(channel: GroupChannel, group_rank: int) -> Group:
    """Join a channel's group; returns when all its processes have joined.

    Whoever opened the store (`rollout.transports.store_server`) keeps it while the group exists.

    Raises:
        DeadlineError: naming the processes that did not join in time, or ended meanwhile.
    """
    timeout = timedelta(seconds=channel.timeout_s)
    present = f"present/{group_rank}"
    try:
        store = SecretStore(channel.store, timeout_s=channel.timeout_s)
        store.set(present, "1")
        store.wait([f"present/{rank}" for rank in range(channel.world_size)], timeout)
        prefix = PrefixStore(channel.backend, store)
        if channel.backend == "gloo":
            group = cast(Group, dist.ProcessGroupGloo(prefix, group_rank, channel.world_size, timeout))
        else:
            group = _nccl_group(prefix, group_rank, channel)
    except (RuntimeError, ValueError) as error:
        raise DeadlineError(
            f"{channel.named(group_rank)} waited {channel.timeout_s:g} s at {channel.store.host}:{channel.store.port} "
            f"for {_absent(channel) or 'the others'} to join the channel"
        ) from error
    _stores[group] = store
    if channel.backend == "nccl":
        try:
            _meet(group, group_rank, channel)
        except RuntimeError:
            leave(group, channel.backend)  # this process lives on, so its device must not wait for the others
            raise
    return group


def _nccl_group(store: PrefixStore, group_rank: int, channel: GroupChannel) -> Group:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=channel.timeout_s)  # for `abort`; `done` keeps the deadline of a publish
    with _without_watchdog():
        return cast(Group, dist.ProcessGroupNCCL(store, group_rank, channel.world_size, options))


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """NCCL groups that are made in the body have no watchdog; Megatron's and vLLM's groups keep theirs.

    TORCH_NCCL_ASYNC_ERROR_HANDLING=0 would not do: a watchdog that sees an error still asks the first NCCL group of the
    process for a record of its flights. That group's monitor writes it, and ends the process minutes later.
    """
    before = os.environ.get(_NO_WATCHDOG)
    os.environ[_NO_WATCHDOG] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_WATCHDOG]
        else:
            os.environ[_NO_WATCHDOG] = before


def _meet(group: Group, group_rank: int, channel: GroupChannel) -> None:
    """Send a byte between every pair that will transfer buckets; sources and engine ranks use the same order."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device_of(channel.backend))
    transfer = group.send if group_rank < len(channel.source_ranks) else group.recv
    deadline = Deadline(channel.timeout_s)
    for peer in channel.peers(group_rank):
        try:
            work = transfer([byte], peer, MEET_TAG)
        except dist.DistBackendError as error:  # the peer ended before both had a communicator
            raise DeadlineError(
                f"{channel.named(group_rank)} could not meet {channel.named(peer)}: {brief(error)}"
            ) from error
        if not done(work, group, deadline, channel.backend):
            raise DeadlineError(
                f"{channel.named(group_rank)} waited {channel.timeout_s:g} s for the first byte between it and "
                f"{channel.named(peer)}"
            )


def _absent(channel: GroupChannel) -> str:
    try:
        store = SecretStore(channel.store, timeout_s=1)
    except RuntimeError:
        return "its store"
    late = [rank for rank in range(channel.world_size) if not store.check([f"present/{rank}"])]
    return ", ".join(channel.named(rank) for rank in late)


def leave(group: Group, backend: Backend) -> None:
    """Leave a group, also during transfers."""
    if backend == "nccl":
        cast(dist.ProcessGroupNCCL, group).abort()


def start_send(group: Group, payload: torch.Tensor, peer: int, tag: int) -> dist.Work | None:
    """Begin to send; None if the peer is known to have ended."""
    try:
        return group.send([payload], peer, tag)
    except RuntimeError:  # the peer has ended
        return None


def start_recv(group: Group, payload: torch.Tensor, peer: int, tag: int) -> dist.Work | None:
    """Begin to receive; None if the peer is known to have ended."""
    try:
        return group.recv([payload], peer, tag)
    except RuntimeError:  # the peer has ended
        return None


def done(work: dist.Work | None, group: Group, deadline: Deadline, backend: Backend) -> bool:
    """Wait for a transfer of `group` until the deadline; returns whether it succeeded."""
    if work is None:
        return False
    if backend == "gloo":
        return _waited(work, group, deadline)
    try:
        while not work.is_completed():
            if deadline.is_over():
                return False
            time.sleep(POLL_S)
        return bool(work.wait())  # already complete: raises if it failed
    except RuntimeError:  # the peer has ended
        return False


def _waited(work: dist.Work, group: Group, deadline: Deadline) -> bool:
    """`done` for gloo."""
    has_ended, succeeded = threading.Event(), list[bool]()

    def wait() -> None:
        with suppress(RuntimeError):  # the peer has ended, or `_close`
            succeeded.append(bool(work.wait(NEVER)))
        has_ended.set()

    threading.Thread(target=wait, name="gloo wait", daemon=True).start()
    while not has_ended.wait(AwakeClock.READ_EVERY_S):
        if deadline.is_over():
            _close(group)
            return False
    return succeeded == [True]


def _close(group: Group) -> None:
    """Close all connections of a gloo group, so that late peers write no more into its tensors.

    A wait whose limit passes does it. It has to be for bytes that nobody sends: a wait for the transfer itself might
    take its completion from the thread that waits for it.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, MEET_TAG).wait(_AT_ONCE)
