"""One record per forward of an engine; forward-cost models, timelines and simulators read them.

Recording is always on: it costs a few microseconds per forward, and records stay in the worker until they are drained.
On a CUDA device a pair of events gives a forward's duration, elsewhere the clock gives it. The newest `NUM_RECENT`
records keep their events, because the device may still run these forwards. Older ones are packed into bytes.

Invariant: every forward is drained once, in the order of recording. It takes 28 bytes until then.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FORWARD = np.dtype(
    [
        ("started_at_s", np.float64),
        ("num_running", np.uint16),
        ("num_preempted", np.uint16),
        ("num_scheduled_tokens", np.int32),
        ("num_context_tokens", np.int64),
        ("seconds", np.float32),
    ]
)
"""Wall clock at the start; requests; requests whose keys and values were thrown away just before, because the cache
was full; tokens computed (prompt chunks, sampled tokens, drafts); tokens whose keys and values were already in the
cache; duration.

In older traces `num_running` has the 32 bits of the first two counts: they read as forwards without preemptions.
"""

Forwards = npt.NDArray[np.void]
"""[N] of `FORWARD`."""

NUM_RECENT = 256
"""Newest forwards that may not have ended; far more than an engine submits ahead of its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRecord:
    """One forward, as the worker records it."""

    started_at_s: float
    num_running: int
    num_preempted: int
    num_scheduled_tokens: int
    num_context_tokens: int
    seconds: Callable[[], float]
    """Returns the duration; waits for the device if the forward has not ended."""


class ForwardLog:
    """Forwards since the last draining."""

    def __init__(self, num_recent: int = NUM_RECENT) -> None:
        """`num_recent`: newest records whose durations are not asked for before draining."""
        self._num_recent = num_recent
        self._recent: deque[ForwardRecord] = deque()
        self._packed = bytearray()
        """Rows of the forwards before them."""

    def append(self, record: ForwardRecord) -> None:
        """Add one forward."""
        self._recent.append(record)
        if len(self._recent) > self._num_recent:
            self._pack_oldest()

    def drain(self) -> bytes:
        """Return all records as the bytes of an array of `FORWARD`, and clear the log."""
        while self._recent:
            self._pack_oldest()
        packed, self._packed = self._packed, bytearray()
        return bytes(packed)

    def _pack_oldest(self) -> None:
        record = self._recent.popleft()
        row = (
            record.started_at_s,
            record.num_running,
            record.num_preempted,
            record.num_scheduled_tokens,
            record.num_context_tokens,
            record.seconds(),
        )
        self._packed += np.array(row, dtype=FORWARD).tobytes()


def decode_forwards(data: bytes) -> Forwards:
    """Array of the bytes that `ForwardLog.drain` returned."""
    return np.frombuffer(data, dtype=FORWARD)
