"""Positions of a text, sorted by what stands before them: the frozen index of a prompt's past responses.

The text is responses one after another, each preceded by `SEPARATOR`, and `END` last. The *left
context* of a position is the token at it, the one before, and so on back to the separator of its
response, which is part of it and sorts before every token. Positions whose contexts end alike stand side by side, so
all places where the text continues as it did after the newest tokens of a request are one range.
(A suffix array of the reversed text; 4 bytes a position, flat and immutable.)

Contexts are compared over `DEPTH` tokens; what is equal that far stands in any order.

Built by counting sort over four tokens, then by doubling (Larsson and Sadakane 2007): places that are
still equal after h tokens are sorted by the rank of the places h to the left of them.
"""

import numpy as np
import numpy.typing as npt

from history.jit import kernel
from history.types import TokenIds

SEPARATOR = -1
"""Before every response."""

END = -2
"""After the last response."""

DEPTH = 64
"""Tokens of context that are sorted by."""

FANOUT = 8
"""Positions behind one fence, and fences behind one of the level before."""

_FANOUT_BITS = 3
_FENCE_BITS = 21
_BEYOND = np.iinfo(np.int64).max
_FIRST_DEPTH = 4
_RADIX_BITS = 11

Order = npt.NDArray[np.int32]
Fences = npt.NDArray[np.int64]


@kernel
def sort_by_left_context(tokens: TokenIds) -> Order:
    """Positions of `tokens` [n], sorted by left context. About 60 ns a token."""
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
    """Positions sorted by the token at them; stable."""
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
    """Tokens numbered 0, 1, ... in their order, and how many there are."""
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
    """From positions sorted by d tokens of context to positions sorted by d + 1."""
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
    """Rank every position by its first `_FIRST_DEPTH` tokens; ranges of `order` that are still equal there."""
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
    """Sort each range, equal over `depth` tokens, by the next `depth`; the ranges that stay equal."""
    room = 0
    for g in range(len(starts)):
        room += (ends[g] - starts[g]) // 2
    new_starts = np.empty(room, dtype=np.int32)
    new_ends = np.empty(room, dtype=np.int32)
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
    """How far the separator lies to the left of each position: 0 at the separator."""
    offsets = np.empty(len(tokens), dtype=np.int32)
    offset = 0
    for i in range(len(tokens)):
        offset = 0 if tokens[i] < 0 else offset + 1
        offsets[i] = offset
    return offsets


@kernel
def _sort(keys: npt.NDArray[np.int64], start: int, end: int) -> None:
    """Sort keys[start:end] in place: insertion where it is short, Shell's gaps where it is long."""
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
    """Whether the contexts of `order` do not decrease."""
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
    """Three tokens of context as one number that sorts as they do; ids of 2^21 - 3 and more, and what is behind
    them, count as one.
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
    """A search tree over `order`, level by level, each a multiple of `FANOUT` long (filled up with `_BEYOND`).

    The last level has the fence of every `FANOUT`th position of `order`, each level before it every
    `FANOUT`th fence of the next, the first is one node. 1.15 bytes a token.
    """
    num_positions = len(order)
    top = top_shift(num_positions)
    total, shift = 0, top
    while shift > 0:
        total += _level_size(num_positions, shift)
        shift -= _FANOUT_BITS
    found = np.full(total, _BEYOND, dtype=np.int64)
    begin, shift = 0, top
    while shift > 0:
        for i in range(-(-num_positions >> shift)):
            position = order[i << shift]
            found[begin + i] = fence(tokens[position], tokens[position - 1], tokens[position - 2])
        begin += _level_size(num_positions, shift)
        shift -= _FANOUT_BITS
    return found


@kernel
def count_below(fences: Fences, num_positions: int, key: int) -> int:
    """How many fences of the last level are smaller than `key`."""
    level, below, shift = 0, 0, top_shift(num_positions)
    while shift > 0:
        level, below, shift = descend(fences, num_positions, key, level, below, shift)
    return below


@kernel
def descend(fences: Fences, num_positions: int, key: int, level: int, below: int, shift: int) -> tuple[int, int, int]:
    """Go down one level in the search for `key`, which starts with (0, 0, `top_shift`) and ends when the shift is 0.

    Looks at one node (a cache line, at `node_at`), and has no branches to guess.

    Args:
        fences: of a segment of `num_positions`.
        num_positions: tells how large each level is.
        key: what is looked for.
        level: where this level begins in `fences`.
        below: how many fences of the level before are smaller than `key`.
        shift: this level has a fence for every 1 << shift positions.

    Returns:
        The same of the next level: where it begins, how many fences of this one are smaller, its shift.
    """
    node = node_at(level, below)
    found = node - level
    for i in range(FANOUT):
        found += fences[node + i] < key
    return level + _level_size(num_positions, shift), found, shift - _FANOUT_BITS


@kernel
def node_at(level: int, below: int) -> int:
    """Where the node of a level begins that a search goes on in; arguments as of `descend`."""
    return level + max(below - 1, 0) * FANOUT


@kernel
def top_shift(num_positions: int) -> int:
    """The shift of a segment's first level."""
    shift = _FANOUT_BITS
    while -(-num_positions >> shift) > FANOUT:
        shift += _FANOUT_BITS
    return shift


@kernel
def _level_size(num_positions: int, shift: int) -> int:
    return (-(-num_positions >> shift) + FANOUT - 1) // FANOUT * FANOUT


@kernel
def num_last_fences(num_positions: int) -> int:
    """Length of the last level, filling included."""
    return _level_size(num_positions, _FANOUT_BITS)


def num_fences(num_positions: int) -> int:
    """Length of what `build_fences` makes."""
    shifts = range(_FANOUT_BITS, top_shift(num_positions) + 1, _FANOUT_BITS)
    return sum(_level_size(num_positions, shift) for shift in shifts)
