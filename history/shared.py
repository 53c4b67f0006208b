"""What any prompt's responses have said lately in this process: where answers are alike, it is drafted too.

A ring of finished responses, each behind a `SEPARATOR`, the newest over the oldest, indexed as the living text of a
prompt is (`history.live`). A position whose text was overwritten is not removed: whoever finds it compares, as always.

Invariant: the ring begins and ends with a separator, so that no comparison leaves it.
Mutating: `keep`.
"""

import numpy as np
import numpy.typing as npt

from history.kernel import kernel
from history.live import append
from history.suffix_array import SEPARATOR
from history.types import TokenIds

RING_TOKENS = 1 << 20
NUM_BUCKETS = 1 << 18
MOST_KEPT = 2048
"""Newest tokens of a response that are kept: it ends between two forwards, and more would take long."""

Longs = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]


@kernel
def keep(ring: TokenIds, buckets: Numbers, end: Longs, text: TokenIds, start: int, stop: int) -> None:
    """Take in text[start:stop]; `end` [1] is where the newest response of the ring ends."""
    start = max(start, stop - MOST_KEPT)
    if stop - start < 2:
        return
    at = end[0] + 1
    if at + (stop - start) + 1 >= len(ring):
        at = 1
    ring[at - 1] = SEPARATOR
    # what is overwritten must not be followed from the new text into the old
    ring[at + (stop - start)] = SEPARATOR
    end[0] = append(ring, buckets, at, text, start, stop, False)
    ring[end[0]] = SEPARATOR
