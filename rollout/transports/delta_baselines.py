"""Memory that processes of one node share: made by one, mapped by others that have been told where it lies.

It has no name in a file system (a memfd, reached through its maker's `/proc/PID/fd`), so nothing is left to sweep when
its maker is killed, and a container's quota for `/dev/shm` does not count. Whether another process sees it is tried
(`show`, `look`), not concluded from names of hosts: containers of one host may or may not share processes.
"""

import mmap
import os
import secrets
import weakref

import torch

from rollout.failures import DeadlineError
from rollout.transports.base import GroupChannel
from rollout.transports.rendezvous import store_of

_TOKEN_BYTES = 16
_SEEN, _UNSEEN = "1", "0"


class NodeMemory:
    """Bytes of one process that grow, and others of its node read."""

    def __init__(self, descriptor: int, address: str, *, is_own: bool) -> None:
        """Use `make` or `find`."""
        self._descriptor = descriptor
        self._is_own = is_own
        self.address = address
        """By which others find it: a path, and what they have to find there."""
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def make(cls) -> "NodeMemory":
        """Memory of this process."""
        descriptor = os.memfd_create("mrl-baselines", os.MFD_CLOEXEC)
        token = secrets.token_hex(_TOKEN_BYTES)
        os.write(descriptor, token.encode())
        return cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor} {token}", is_own=True)

    @classmethod
    def find(cls, address: str) -> "NodeMemory | None":
        """Another process's; None where this one does not see it."""
        path, token = address.split()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            memory = cls(descriptor, address, is_own=False)
            # on another node the same path may be anything
            return memory if os.pread(descriptor, len(token), 0) == token.encode() else None
        except OSError:
            return None

    def grow(self, num_bytes: int) -> int:
        """Add so many bytes; returns where they start.

        Raises:
            RuntimeError: there is no memory for them.
        """
        size = os.fstat(self._descriptor).st_size
        start = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._descriptor, start, num_bytes)
        except OSError as error:
            raise RuntimeError(
                f"no memory for {num_bytes} bytes more of publish baselines beside {start}: set publish.delta=false"
            ) from error
        return start

    def view(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes from `start` on, uint8 [num_bytes]: writable for their maker; others see what it has written.

        Raises:
            RuntimeError: no such bytes were made.
        """
        # a reader's mapping is private: torch wants writable memory, and nobody may write through to others
        access = mmap.ACCESS_WRITE if self._is_own else mmap.ACCESS_COPY
        try:
            mapped = mmap.mmap(self._descriptor, num_bytes, access=access, offset=start)
        except (OSError, ValueError, OverflowError) as error:
            raise RuntimeError(f"{num_bytes} bytes of publish baselines from {start} on: {error}") from error
        return torch.frombuffer(mapped, dtype=torch.uint8)


def show(memory: NodeMemory, channel: GroupChannel, group_rank: int) -> bool:
    """Tell the rank that one of a channel's sources sends to where memory lies; whether it sees it.

    Raises:
        RuntimeError: it does not answer.
    """
    (peer,) = channel.peers(group_rank)
    store = store_of(channel)
    store.set(f"memory/{peer}", memory.address)
    return _answer(channel, group_rank, peer, f"sees/{peer}") == _SEEN.encode()


def look(channel: GroupChannel, group_rank: int) -> NodeMemory | None:
    """What the rank that sends to this one has shown; None where it lies on another node.

    Raises:
        RuntimeError: it has shown nothing.
    """
    (peer,) = channel.peers(group_rank)
    found = NodeMemory.find(_answer(channel, group_rank, peer, f"memory/{group_rank}").decode())
    store_of(channel).set(f"sees/{group_rank}", _UNSEEN if found is None else _SEEN)
    return found


def _answer(channel: GroupChannel, group_rank: int, peer: int, key: str) -> bytes:
    try:
        return bytes(store_of(channel).get(key))
    except RuntimeError as error:
        raise DeadlineError(
            f"{channel.named(group_rank)} waited {channel.timeout_s:g} s for {channel.named(peer)} to say where its "
            "publish baselines lie"
        ) from error
