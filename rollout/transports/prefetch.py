"""Receives a streaming transport's buckets ahead of their use.

A thread receives buckets while the engine still decodes. So generation pauses only once the first bucket is verified,
and the network works while the engine loads.

Invariants: buckets are received in index order; at most `window` buckets are received or in transfer and not yet taken;
the first failure ends the reception and is raised by the next call of `arrived` or `take`.
"""

import queue
import threading
from collections.abc import Sequence

import torch

from rollout.transports.base import Inbox
from rollout.weights.manifest import Bucket

_POLL_S = 0.2


class Prefetch:
    """Satisfies `rollout.transports.base.AwaitedInbox`."""

    def __init__(self, inbox: Inbox, buckets: Sequence[Bucket], *, window: int = 1) -> None:
        self._inbox = inbox
        self._room = threading.Semaphore(window)
        self._ready: queue.SimpleQueue[tuple[int, torch.Tensor] | RuntimeError] = queue.SimpleQueue()
        self._held: dict[int, torch.Tensor] = {}
        self._error: RuntimeError | None = None
        self._arrived = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._receive, args=(tuple(buckets),), name="prefetch", daemon=True)
        self._thread.start()

    def _receive(self, buckets: tuple[Bucket, ...]) -> None:
        for bucket in buckets:
            while not self._room.acquire(timeout=_POLL_S) and not self._closed.is_set():
                pass
            if self._closed.is_set():
                return
            try:
                # no local variable: nothing here may hold the bucket once it has been taken
                self._ready.put((bucket.index, self._inbox.take(bucket)))
            except RuntimeError as error:
                self._error = error
                self._ready.put(error)
                return
            self._arrived = True

    def arrived(self) -> bool:
        """Whether the first bucket is received and verified.

        Raises:
            RuntimeError: the first bucket cannot arrive any more.
        """
        if self._error is not None and not self._arrived:
            raise self._error
        return self._arrived

    def take(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket after waiting for it; the underlying inbox keeps the deadline."""
        while bucket.index not in self._held:
            received = self._ready.get()
            if isinstance(received, RuntimeError):
                raise received
            index, payload = received
            self._held[index] = payload
            self._room.release()
        payload = self._held.pop(bucket.index)
        if payload.is_cuda:
            # Allocated on the stream of the receiving thread, read on the caller's: vLLM gives the ranks of a
            # larger engine streams of their own. The allocator must not hand the memory on before the reads are done.
            payload.record_stream(torch.cuda.current_stream(payload.device))
        return payload

    @property
    def received_bytes(self) -> int:
        """As the underlying inbox counts them."""
        return self._inbox.received_bytes

    def close(self) -> None:
        """Stop receiving after the current bucket."""
        self._closed.set()
