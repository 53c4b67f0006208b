"""One record per forward of an engine: the raw material of price surfaces, timelines and simulators.

Recording costs a few microseconds per forward and nothing is sent until somebody drains it, so it is
always on. On a CUDA device a forward's duration comes from a pair of events that are only looked at
when they are drained; elsewhere from the clock.

Invariant: at most `CAPACITY` records are held; the oldest ones go first and are counted.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FORWARD = np.dtype(
    [
        ("started_at_s", np.float64),
        ("num_running", np.int32),
        ("num_scheduled_tokens", np.int32),
        ("num_context_tokens", np.int64),
        ("seconds", np.float32),
    ]
)
"""Wall clock at its start; requests in it; tokens computed (prompt chunks, sampled ones, drafts); tokens whose keys and
values were there before; duration."""

Forwards = npt.NDArray[np.void]
"""[N] of `FORWARD`."""

CAPACITY = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRecord:
    """One forward, as the worker sees it."""

    started_at_s: float
    num_running: int
    num_scheduled_tokens: int
    num_context_tokens: int
    seconds: Callable[[], float]
    """Its duration; asked for when the record is drained, since a device may still be at work before."""


class ForwardLog:
    """Bounded buffer of forwards, drained in batches."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._records: deque[ForwardRecord] = deque(maxlen=capacity)
        self.num_lost = 0
        """Records that were overwritten before anybody drained them."""

    def append(self, record: ForwardRecord) -> None:
        """Add one forward."""
        if len(self._records) == self._records.maxlen:
            self.num_lost += 1
        self._records.append(record)

    def drain(self) -> bytes:
        """Return all records as the bytes of an array of `FORWARD`, and forget them."""
        rows = [
            (r.started_at_s, r.num_running, r.num_scheduled_tokens, r.num_context_tokens, r.seconds())
            for r in self._records
        ]
        self._records.clear()
        return np.array(rows, dtype=FORWARD).tobytes()


def decode_forwards(data: bytes) -> Forwards:
    """Read what `ForwardLog.drain` wrote."""
    return np.frombuffer(data, dtype=FORWARD)
