"""What any prompt's responses have said lately in this process: where answers are alike, it is drafted too.

A ring of texts, each behind a `SEPARATOR`, the newest over the oldest, indexed as the living text of a prompt is
(`history.drafting.live_text`), but by five tokens, too, and with many more places of one context: what most answers say
next is a matter of votes. Running responses write into regions of `REGION` tokens; one that did not fit into its first
region is kept whole when it ends, since nothing is followed from one region into the next. A position whose text was
overwritten is not removed: whoever finds it compares, as always.

Invariant: the ring begins and ends with a separator, so that no comparison leaves it.
Mutating: `append_running`, `append_finished`.
"""

import numpy as np
import numpy.typing as npt

from history.drafting.live_text import BY_FIVE_TOO, FIVE, append
from history.index.suffix_array import SEPARATOR
from history.jit import kernel
from history.types import TokenIds

RING_TOKENS = 1 << 20
NUM_BUCKETS = 1 << 18
NUM_PLACES = 32
"""Newest positions kept of one context."""
REGION = 64
_CONTEXT = FIVE - 1
"""Tokens that a further region repeats, so that contexts reach over its beginning."""
MAX_FINISHED_TOKENS = 2048
"""Newest tokens of a response that are kept: it ends between two forwards, and more would take long."""

Longs = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]


@kernel
def append_running(
    ring: TokenIds,
    buckets: Numbers,
    end: Longs,
    text: TokenIds,
    first: int,
    start: int,
    stop: int,
    region_end: int,
    region_stop: int,
) -> tuple[int, int]:
    """Take in text[start:stop] of a response that still runs and began at `first`; `end` as for `append_finished`.

    `region_end`, `region_stop`: where its region grows and ends (the same: it is full, or there is none). Returns both.
    """
    while start < stop:
        if region_end == region_stop:
            region_end = _reserve(ring, end)
            region_stop = region_end + REGION
            region_end = append(ring, buckets, region_end, text, max(start - _CONTEXT, first), start, BY_FIVE_TOO)
        following = min(stop, start + region_stop - region_end)
        region_end = append(ring, buckets, region_end, text, start, following, BY_FIVE_TOO)
        start = following
    return region_end, region_stop


@kernel
def _reserve(ring: TokenIds, end: Longs) -> int:
    """The first position of a new region, which is cleared: nothing is followed into what stood there."""
    at = int(end[0]) + 1
    if at + REGION + 1 >= len(ring):
        at = 1
    ring[at - 1 : at + REGION + 1] = SEPARATOR
    end[0] = at + REGION
    return at


@kernel
def append_finished(ring: TokenIds, buckets: Numbers, end: Longs, text: TokenIds, start: int, stop: int) -> None:
    """Take in text[start:stop]; `end` [1] is where the newest response of the ring ends."""
    start = max(start, stop - MAX_FINISHED_TOKENS)
    if stop - start < 2:
        return
    at = end[0] + 1
    if at + (stop - start) + 1 >= len(ring):
        at = 1
    ring[at - 1] = SEPARATOR
    # what is overwritten must not be followed from the new text into the old
    ring[at + (stop - start)] = SEPARATOR
    end[0] = append(ring, buckets, at, text, start, stop, BY_FIVE_TOO)
    ring[end[0]] = SEPARATOR
