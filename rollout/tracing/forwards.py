"""One record per forward of an engine; forward-cost models, timelines and simulators read them.

Recording is always on: it costs a few microseconds per forward, and records stay in the worker until they are drained.
On a CUDA device a pair of events gives a forward's duration and is read at draining; elsewhere the clock gives it.

Invariant: at most `CAPACITY` records are held; the oldest are overwritten and counted.
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

CAPACITY = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRecord:
    """One forward, as the worker records it."""

    started_at_s: float
    num_running: int
    num_preempted: int
    num_scheduled_tokens: int
    num_context_tokens: int
    seconds: Callable[[], float]
    """Returns the duration; called at draining, because a device may still be running the forward before."""


class ForwardLog:
    """Bounded buffer of forwards, drained in batches."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._records: deque[ForwardRecord] = deque(maxlen=capacity)
        self.num_lost = 0
        """Records that were overwritten before they were drained."""

    def append(self, record: ForwardRecord) -> None:
        """Add one forward."""
        if len(self._records) == self._records.maxlen:
            self.num_lost += 1
        self._records.append(record)

    def drain(self) -> bytes:
        """Return all records as the bytes of an array of `FORWARD`, and clear the log."""
        rows = [
            (
                r.started_at_s,
                r.num_running,
                r.num_preempted,
                r.num_scheduled_tokens,
                r.num_context_tokens,
                r.seconds(),
            )
            for r in self._records
        ]
        self._records.clear()
        return np.array(rows, dtype=FORWARD).tobytes()


def decode_forwards(data: bytes) -> Forwards:
    """Array of the bytes that `ForwardLog.drain` returned."""
    return np.frombuffer(data, dtype=FORWARD)
