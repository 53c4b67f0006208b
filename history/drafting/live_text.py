"""The living text of one prompt: the tokens of its requests so far in this process, indexed while it grows.

One int32 array holds regions between `SEPARATOR`s: first the prompt, then a region for every request of the group, as
long as its longest response. `buckets` [a power of two, places] maps the hash of a context of three tokens to its
newest positions. Without a history of the prompt, single tokens are indexed too. The ring of other prompts' texts
(`history.drafting.recent_ring`) also indexes five tokens. Different contexts may share a bucket, so readers compare the
tokens.

Invariants: a position is in a bucket only if a token follows it; unwritten positions hold separators.
Mutating: `append`, `reindex`.
"""

import numpy as np
import numpy.typing as npt

from history.index.search import num_equal
from history.index.suffix_array import SEPARATOR
from history.jit import kernel
from history.types import TokenIds

BUCKET = 4
"""Positions kept for one context of a living text."""

BY_THREE, BY_ONE_AND_THREE, BY_ONE_THREE_FIVE = range(3)
"""Contexts that index a text: three tokens; also single tokens; also five tokens."""

FIVE = 5
_ALL = 1 << 30

_ALONE = SEPARATOR - 1
"""Replaces the tokens before a single-token context in its hash."""

Numbers = npt.NDArray[np.int32]


@kernel
def append(live: TokenIds, buckets: Numbers, end: int, text: TokenIds, start: int, stop: int, contexts: int) -> int:
    """Write text[start:stop] at `end` of a region and index the positions before; return the region's new end."""
    for i in range(start, stop):
        live[end] = text[i]
        if live[end - 1] >= 0:
            _index(live, buckets, end - 1, contexts)
        end += 1
    return end


@kernel
def reindex(live: TokenIds, buckets: Numbers, num_used: int, contexts: int) -> None:
    """Index a whole text again, into other, empty buckets."""
    for position in range(1, num_used - 1):
        if live[position] >= 0 and live[position + 1] >= 0:
            _index(live, buckets, position, contexts)


@kernel
def bucket_of(num_buckets: int, text: TokenIds, last: int, limit: int) -> int:
    """Return the bucket of the context of `last` in `text`; its response has `limit` tokens (at least one)."""
    second = text[last - 1] if limit > 1 else SEPARATOR
    third = text[last - 2] if limit > 2 else SEPARATOR
    return _hash(text[last], second, third) & (num_buckets - 1)


@kernel
def bucket_of_five(num_buckets: int, text: TokenIds, last: int) -> int:
    """Return the bucket of the five tokens up to `last`, which all belong to one response."""
    nearest = _hash(text[last], text[last - 1], text[last - 2])
    return _hash(nearest, text[last - 3], text[last - 4]) & (num_buckets - 1)


@kernel
def newest_places(
    live: TokenIds, buckets: Numbers, text: TokenIds, last: int, limit: int, contexts: int, places: TokenIds
) -> tuple[int, int]:
    """Write the positions after the longest known matches of the context of `last` into `places`, newest first.

    The search uses three tokens (two at the beginning of a response), then the newest token alone. A text indexed by
    five tokens is searched by five first, and all matches of five tokens count alike: a vote of many places is right
    more often than the longest match. Returns the number of places and the number of matching tokens.
    """
    count, best, most = 0, 0, _ALL
    if contexts == BY_ONE_THREE_FIVE:
        most = FIVE
        if limit >= FIVE:
            bucket = bucket_of_five(len(buckets), text, last)
            count, best = _matching(live, buckets, bucket, text, last, limit, FIVE, FIVE, places)
    if count == 0:
        bucket = bucket_of(len(buckets), text, last, limit)
        count, best = _matching(live, buckets, bucket, text, last, limit, min(limit + 1, 3), most, places)
    if count == 0 and contexts != BY_THREE:
        bucket = _hash(text[last], _ALONE, _ALONE) & (len(buckets) - 1)
        count, best = _matching(live, buckets, bucket, text, last, limit, 1, most, places)
    return count, best


@kernel
def _matching(
    live: TokenIds,
    buckets: Numbers,
    bucket: int,
    text: TokenIds,
    last: int,
    limit: int,
    least: int,
    most: int,
    places: TokenIds,
) -> tuple[int, int]:
    """Write the longest matches of a bucket into `places`; matches have `least` to `most` tokens."""
    count, best, limit = 0, least, min(limit, most)
    for i in range(buckets.shape[1]):
        position = buckets[bucket, i]
        if position < 0:
            break
        equal = min(num_equal(live, position, text, last, limit), most)
        if equal > best:
            best, count = equal, 0
        if equal == best:
            places[count] = position + 1
            count += 1
    return count, best


@kernel
def _index(live: TokenIds, buckets: Numbers, position: int, contexts: int) -> None:
    second = live[position - 1]
    third = live[position - 2] if second >= 0 else SEPARATOR
    _push(buckets, _hash(live[position], second, third) & (len(buckets) - 1), position)
    if contexts != BY_THREE:
        _push(buckets, _hash(live[position], _ALONE, _ALONE) & (len(buckets) - 1), position)
    if contexts == BY_ONE_THREE_FIVE and third >= 0 and live[position - 3] >= 0 and live[position - 4] >= 0:
        _push(buckets, bucket_of_five(len(buckets), live, position), position)


@kernel
def _push(buckets: Numbers, bucket: int, position: int) -> None:
    for i in range(buckets.shape[1] - 1, 0, -1):
        buckets[bucket, i] = buckets[bucket, i - 1]
    buckets[bucket, 0] = position


@kernel
def _hash(first: int, second: int, third: int) -> int:
    mixed = np.uint64(first) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32)) ^ np.uint64(second + 2)) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed = (mixed ^ (mixed >> np.uint64(29)) ^ np.uint64(third + 2)) * np.uint64(0x165667B19E3779F9)
    return int(np.int64(mixed >> np.uint64(33)))
