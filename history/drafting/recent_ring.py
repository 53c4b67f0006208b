"""Ring of recent responses of all prompts in this process, a source of drafts where answers are alike.

The newest text overwrites the oldest; each text follows a `SEPARATOR`. The index equals that of a living text
(`history.drafting.live_text`), but also uses five tokens. It keeps many more places per context, for a vote.
Running responses write into regions of `REGION` tokens. A response longer than one region is appended whole when it
ends, because drafts do not continue from one region into the next. Positions of overwritten text stay in the index;
readers compare the tokens.

Invariant: the ring begins and ends with a separator, so that no comparison leaves it.
Mutating: `append_running`, `append_finished`.
"""

import numpy as np
import numpy.typing as npt

from history.drafting.live_text import BY_ONE_THREE_FIVE, FIVE, append
from history.index.suffix_array import SEPARATOR
from history.jit import kernel
from history.types import TokenIds

RING_TOKENS = 1 << 20
NUM_BUCKETS = 1 << 18
NUM_PLACES = 32
"""Newest positions kept for one context."""
REGION = 64
_CONTEXT = FIVE - 1
"""Tokens that a further region repeats, so that contexts span its beginning."""
MAX_FINISHED_TOKENS = 2048
"""Newest tokens of an ended response that are appended; more would delay the next forward."""

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
    """Append text[start:stop] of a running response that began at `first`; `end` as for `append_finished`.

    The response's region grows at `region_end` and ends at `region_stop`; equal values: full, or no region. Returns the
    new values of both.
    """
    while start < stop:
        if region_end == region_stop:
            region_end = _reserve(ring, end)
            region_stop = region_end + REGION
            region_end = append(ring, buckets, region_end, text, max(start - _CONTEXT, first), start, BY_ONE_THREE_FIVE)
        following = min(stop, start + region_stop - region_end)
        region_end = append(ring, buckets, region_end, text, start, following, BY_ONE_THREE_FIVE)
        start = following
    return region_end, region_stop


@kernel
def _reserve(ring: TokenIds, end: Longs) -> int:
    """Clear a new region, so that no draft follows old text, and return its first position."""
    at = int(end[0]) + 1
    if at + REGION + 1 >= len(ring):
        at = 1
    ring[at - 1 : at + REGION + 1] = SEPARATOR
    end[0] = at + REGION
    return at


@kernel
def append_finished(ring: TokenIds, buckets: Numbers, end: Longs, text: TokenIds, start: int, stop: int) -> None:
    """Append text[start:stop]; the newest response of the ring ends at `end` [1]."""
    start = max(start, stop - MAX_FINISHED_TOKENS)
    if stop - start < 2:
        return
    at = end[0] + 1
    if at + (stop - start) + 1 >= len(ring):
        at = 1
    ring[at - 1] = SEPARATOR
    # a separator keeps drafts of the new text from following the old text
    ring[at + (stop - start)] = SEPARATOR
    end[0] = append(ring, buckets, at, text, start, stop, BY_ONE_THREE_FIVE)
    ring[end[0]] = SEPARATOR
