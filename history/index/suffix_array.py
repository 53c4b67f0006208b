"""Suffix array of a prompt's past responses, sorted by left context: the frozen index of a segment.

The text holds all responses, each after a `SEPARATOR`, and `END` last. The *left context* of a position is its token
and the tokens before it, back to the separator of its response. The separator belongs to the context and sorts before
every token. Positions with equal recent tokens are neighbours, so all continuations of a context form one range. (This
is a suffix array of the reversed text: 4 bytes a position, flat and immutable.)

Contexts are compared over `DEPTH` tokens; longer equal contexts stand in any order.

A counting sort orders positions by four tokens, then prefix doubling refines the order (Larsson and Sadakane 2007):
positions equal over h tokens are sorted by the rank of the position h to the left.
"""

import numpy as np
import numpy.typing as npt

from history.jit import kernel
from history.types import TokenIds

SEPARATOR = -1
"""Token before every response."""

END = -2
"""Token after the last response."""

DEPTH = 64
"""Tokens of context that the order compares."""

FANOUT = 8
"""Positions per fence, and fences per fence of the level above."""

_FANOUT_BITS = 3
_FENCE_BITS = 21
_BEYOND = np.iinfo(np.int64).max
_FIRST_DEPTH = 4
_RADIX_BITS = 11

Order = npt.NDArray[np.int32]
Fences = npt.NDArray[np.int64]


@kernel
def sort_by_left_context(tokens: TokenIds) -> Order:
    """Sort the positions of `tokens` [n] by left context. About 60 ns a token."""
    num_tokens = len(tokens)
    order = _sort_by_token(tokens)
    ids, num_ids = _dense_ids(tokens, order)
    for _ in range(_FIRST_DEPTH - 1):
        order = _prepend_token(ids, num_ids, order)
    ranks = np.empty(num_tokens, dtype=np.int32)
    starts, ends = _groups(tokens, order, ranks)
    offsets = _offsets(tokens)
    keys = np.empty(num_tokens, dtype=np.int64)
    depth = _FIRST_DEPTH
    while depth < DEPTH and len(starts):
        starts, ends = _refine(order, ranks, offsets, starts, ends, keys, depth)
        depth *= 2
    return order


@kernel
def _sort_by_token(tokens: TokenIds) -> Order:
    """Sort positions by their token; stable."""
    num_tokens = len(tokens)
    order = np.arange(num_tokens).astype(np.int32)
    other = np.empty(num_tokens, dtype=np.int32)
    largest = 0
    for token in tokens:
        largest = max(largest, token - END)
    shift = 0
    counts = np.empty(1 << _RADIX_BITS, dtype=np.int64)
    mask = (1 << _RADIX_BITS) - 1
    while shift == 0 or largest >> shift:
        counts[:] = 0
        for token in tokens:
            counts[((token - END) >> shift) & mask] += 1
        total = 0
        for digit in range(len(counts)):
            count = counts[digit]
            counts[digit] = total
            total += count
        for position in order:
            digit = ((tokens[position] - END) >> shift) & mask
            other[counts[digit]] = position
            counts[digit] += 1
        order, other = other, order
        shift += _RADIX_BITS
    return order


@kernel
def _dense_ids(tokens: TokenIds, order: Order) -> tuple[TokenIds, int]:
    """Number the distinct tokens 0, 1, ... in their order; return each position's number and the count."""
    ids = np.empty(len(tokens), dtype=np.int32)
    last = -1
    previous = END - 1
    for position in order:
        if tokens[position] != previous:
            previous = tokens[position]
            last += 1
        ids[position] = last
    return ids, last + 1


@kernel
def _prepend_token(ids: TokenIds, num_ids: int, order: Order) -> Order:
    """Turn an order by d tokens of context into an order by d + 1 tokens."""
    num_tokens = len(ids)
    heads = np.zeros(num_ids + 1, dtype=np.int32)
    for identifier in ids:
        heads[identifier + 1] += 1
    for identifier in range(num_ids):
        heads[identifier + 1] += heads[identifier]
    longer = np.empty(num_tokens, dtype=np.int32)
    longer[heads[ids[0]]] = 0
    heads[ids[0]] += 1
    for position in order:
        if position + 1 < num_tokens:
            identifier = ids[position + 1]
            longer[heads[identifier]] = position + 1
            heads[identifier] += 1
    return longer


@kernel
def _groups(tokens: TokenIds, order: Order, ranks: Order) -> tuple[Order, Order]:
    """Rank every position by its first `_FIRST_DEPTH` tokens; return the ranges of `order` that are still equal."""
    num_tokens = len(tokens)
    starts = np.empty(num_tokens // 2 + 1, dtype=np.int32)
    ends = np.empty(num_tokens // 2 + 1, dtype=np.int32)
    count = 0
    start = 0
    for i in range(num_tokens):
        if i and not _equal_over(tokens, order[i - 1], order[i], _FIRST_DEPTH):
            if i - start > 1:
                starts[count] = start
                ends[count] = i
                count += 1
            start = i
        ranks[order[i]] = start
    if num_tokens - start > 1:
        starts[count] = start
        ends[count] = num_tokens
        count += 1
    return starts[:count], ends[:count]


@kernel
def _equal_over(tokens: TokenIds, a: int, b: int, depth: int) -> bool:
    for i in range(depth):
        if tokens[a - i] != tokens[b - i]:
            return False
        if tokens[a - i] < 0:
            return True
    return True


@kernel
def _refine(
    order: Order, ranks: Order, offsets: Order, starts: Order, ends: Order, keys: npt.NDArray[np.int64], depth: int
) -> tuple[Order, Order]:
    """Sort each range of equal `depth` tokens by the next `depth` tokens; return the ranges that stay equal."""
    most_ranges = 0
    for g in range(len(starts)):
        most_ranges += (ends[g] - starts[g]) // 2
    new_starts = np.empty(most_ranges, dtype=np.int32)
    new_ends = np.empty(most_ranges, dtype=np.int32)
    count = 0
    for g in range(len(starts)):
        start, end = starts[g], ends[g]
        if offsets[order[start]] < depth:
            continue
        for i in range(start, end):
            keys[i] = (np.int64(ranks[order[i] - depth]) << 32) | order[i]
        _sort(keys, start, end)
        first = start
        for i in range(start, end):
            order[i] = keys[i] & 0x7FFFFFFF
            if (keys[i] ^ keys[first]) >> 32:
                if i - first > 1:
                    new_starts[count] = first
                    new_ends[count] = i
                    count += 1
                first = i
            ranks[order[i]] = first
        if end - first > 1:
            new_starts[count] = first
            new_ends[count] = end
            count += 1
    return new_starts[:count], new_ends[:count]


@kernel
def _offsets(tokens: TokenIds) -> Order:
    """Distance of each position to the separator on its left; 0 at the separator."""
    offsets = np.empty(len(tokens), dtype=np.int32)
    offset = 0
    for i in range(len(tokens)):
        offset = 0 if tokens[i] < 0 else offset + 1
        offsets[i] = offset
    return offsets


@kernel
def _sort(keys: npt.NDArray[np.int64], start: int, end: int) -> None:
    """Sort keys[start:end] in place by Shell sort."""
    size = end - start
    gap = 1
    while gap < size // 9:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(start + gap, end):
            key = keys[i]
            j = i
            while j >= start + gap and keys[j - gap] > key:
                keys[j] = keys[j - gap]
                j -= gap
            keys[j] = key
        gap //= 3


@kernel
def is_sorted(tokens: TokenIds, order: Order) -> bool:
    """Check that the contexts of `order` never decrease."""
    for i in range(1, len(order)):
        a, b = order[i - 1], order[i]
        for depth in range(DEPTH):
            if tokens[a - depth] > tokens[b - depth]:
                return False
            if tokens[a - depth] < tokens[b - depth] or tokens[a - depth] < 0:
                break
    return True


@kernel
def fence(first: int, second: int, third: int) -> int:
    """Pack three tokens of context into one number that sorts as they do.

    Ids of 2^21 - 3 and more count as equal, and so do the tokens after such an id.
    """
    most = (1 << _FENCE_BITS) - 1
    key = min(first - END, most) << 2 * _FENCE_BITS
    if first >= 0 and first - END < most:
        key |= min(second - END, most) << _FENCE_BITS
        if second >= 0 and second - END < most:
            key |= min(third - END, most)
    return key


@kernel
def build_fences(tokens: TokenIds, order: Order) -> Fences:
    """Build a search tree over `order`, level by level; `_BEYOND` pads each level to a multiple of `FANOUT`.

    The last level holds the fence of every `FANOUT`th position of `order`. Each level above holds every `FANOUT`th
    fence of the level below. The first level is one node. 1.15 bytes a token.
    """
    num_positions = len(order)
    top = top_shift(num_positions)
    total, shift = 0, top
    while shift > 0:
        total += _level_size(num_positions, shift)
        shift -= _FANOUT_BITS
    fences = np.full(total, _BEYOND, dtype=np.int64)
    begin, shift = 0, top
    while shift > 0:
        for i in range(-(-num_positions >> shift)):
            position = order[i << shift]
            fences[begin + i] = fence(tokens[position], tokens[position - 1], tokens[position - 2])
        begin += _level_size(num_positions, shift)
        shift -= _FANOUT_BITS
    return fences


@kernel
def count_below(fences: Fences, num_positions: int, key: int) -> int:
    """Count the fences of the last level that are smaller than `key`."""
    level, below, shift = 0, 0, top_shift(num_positions)
    while shift > 0:
        level, below, shift = descend(fences, num_positions, key, level, below, shift)
    return below


@kernel
def descend(fences: Fences, num_positions: int, key: int, level: int, below: int, shift: int) -> tuple[int, int, int]:
    """Go down one level in the search for `key`. The search starts at (0, 0, `top_shift`) and ends at shift 0.

    Reads one node (a cache line, at `node_at`) without branches.

    Args:
        fences: of a segment of `num_positions`.
        num_positions: gives the size of each level.
        key: fence to search for.
        level: index in `fences` at which this level begins.
        below: number of fences of the level above that are smaller than `key`.
        shift: this level has a fence for every 1 << shift positions.

    Returns:
        `level`, `below` and `shift` of the next level.
    """
    node = node_at(level, below)
    num_smaller = node - level
    for i in range(FANOUT):
        num_smaller += fences[node + i] < key
    return level + _level_size(num_positions, shift), num_smaller, shift - _FANOUT_BITS


@kernel
def node_at(level: int, below: int) -> int:
    """Index of the node in which a search continues; arguments as of `descend`."""
    return level + max(below - 1, 0) * FANOUT


@kernel
def top_shift(num_positions: int) -> int:
    """Shift of a segment's first level."""
    shift = _FANOUT_BITS
    while -(-num_positions >> shift) > FANOUT:
        shift += _FANOUT_BITS
    return shift


@kernel
def _level_size(num_positions: int, shift: int) -> int:
    return (-(-num_positions >> shift) + FANOUT - 1) // FANOUT * FANOUT


@kernel
def num_last_fences(num_positions: int) -> int:
    """Length of the last level, padding included."""
    return _level_size(num_positions, _FANOUT_BITS)


def num_fences(num_positions: int) -> int:
    """Length of the array that `build_fences` returns."""
    shifts = range(_FANOUT_BITS, top_shift(num_positions) + 1, _FANOUT_BITS)
    return sum(_level_size(num_positions, shift) for shift in shifts)
