"""Finds where texts continue as a request's text does now, and says what comes next there.

The *context* of a position is the token at it, the one before, and so on back to the separator before its
response, which is part of it: a beginning matches beginnings, and nothing of a prompt or of a
response before is ever compared. A segment is searched through its fences (every 8th context in their
order, its first three tokens packed into a number), then in the few positions around where that ends.
"""

import numpy as np
import numpy.typing as npt

from history.index.suffix_array import DEPTH, FANOUT, SEPARATOR, Fences, Order, count_below, fence, num_last_fences
from history.jit import kernel
from history.types import TokenIds

WINDOW = 32
"""Positions of a segment that are compared token by token, at most."""

_FEW = 4
"""Equal fences that are counted one by one."""


@kernel
def num_equal(tokens: TokenIds, position: int, text: TokenIds, last: int, limit: int) -> int:
    """How many tokens the contexts of `position` in `tokens` and of `last` in `text` share.

    `limit` tokens of `text` up to `last` belong to its response; if all are equal and a response begins in
    `tokens` where this one does, that counts as one more.
    """
    for i in range(min(limit, DEPTH)):
        if tokens[position - i] != text[last - i]:
            return i
    if limit < DEPTH and tokens[position - limit] == SEPARATOR:
        return limit + 1
    return min(limit, DEPTH)


@kernel
def context_fence(text: TokenIds, last: int, limit: int) -> int:
    """The first three tokens of the context of `last`, as fences hold them."""
    return fence(
        text[last] if limit > 0 else SEPARATOR,
        text[last - 1] if limit > 1 else SEPARATOR,
        text[last - 2] if limit > 2 else SEPARATOR,
    )


@kernel
def window(fences: Fences, num_tokens: int, key: int, first: int) -> tuple[int, int]:
    """The range of a segment's order in which all contexts lie that begin with the three tokens of `key`.

    If there are none, those on both sides of where they would be, one of which matches longest. `first` is how many
    fences are smaller than `key` (`count_below`).
    """
    last = first
    widest = len(fences) - num_last_fences(num_tokens)
    while last < first + _FEW and widest + last < len(fences) and fences[widest + last] == key:
        last += 1
    if last == first + _FEW:
        last = count_below(fences, num_tokens, key + 1)
    return max(first - 1, 0) * FANOUT, min(last * FANOUT + 1, num_tokens)


@kernel
def narrowed(
    tokens: TokenIds, order: Order, begin: int, end: int, text: TokenIds, last: int, limit: int
) -> tuple[int, int]:
    """A range of at most `WINDOW` positions around the place in begin..end that the context of `last` would have."""
    low, high = begin, end
    while high - low > 1:
        middle = (low + high) >> 1
        position = order[middle]
        equal = num_equal(tokens, position, text, last, limit)
        theirs = text[last - equal] if equal < limit else SEPARATOR
        if equal <= limit and equal < DEPTH and tokens[position - equal] < theirs:
            low = middle
        else:
            high = middle
    return max(low - WINDOW // 4, begin), min(low + 3 * WINDOW // 4, end)


@kernel
def best_places(
    tokens: TokenIds, order: Order, begin: int, end: int, text: TokenIds, last: int, limit: int, places: TokenIds
) -> tuple[int, int]:
    """The positions behind the longest match among order[begin:end], into `places`.

    Returns how many (at most len(places)) and how many tokens match.
    """
    best, count = 1, 0
    for i in range(begin, end):
        position = order[i]
        equal = num_equal(tokens, position, text, last, limit)
        if equal < best and count > 0:
            break  # contexts are sorted: what matches less stands on both sides of what matches most
        if equal > best:
            best, count = equal, 0
        if equal == best and count < len(places):
            places[count] = position + 1
            count += 1
    return count, best


@kernel
def follow(
    tokens: TokenIds, places: TokenIds, count: int, chain: TokenIds, votes: npt.NDArray[np.int32]
) -> tuple[int, int]:
    """What most of `places` say next, token by token, into `chain` [K]; places that differ leave.

    `votes` [K, 2]: how many said the chain's token, of how many that agreed until then. A chain ends before
    the end of a response. Returns its length and the place that agrees with it longest. Uses `places` up.
    """
    length = 0
    while count > 1 and length < len(chain):
        token, agreeing = _majority(tokens, places, count)
        if token < 0:
            return length, places[0] - length
        chain[length] = token
        votes[length, 0], votes[length, 1] = agreeing, count
        agreed = 0
        for i in range(count):
            if tokens[places[i]] == token:
                places[agreed] = places[i] + 1
                agreed += 1
        count = agreed
        length += 1
    anchor = places[0] - length
    while length < len(chain) and tokens[anchor + length] >= 0:
        chain[length] = tokens[anchor + length]
        votes[length, 0], votes[length, 1] = 1, 1
        length += 1
    return length, anchor


@kernel
def _majority(tokens: TokenIds, places: TokenIds, count: int) -> tuple[int, int]:
    """The token that most of the places hold, the first of several, and how many do."""
    best, most = tokens[places[0]], 1
    for i in range(1, count):
        most += tokens[places[i]] == best
    i = 1
    while most < count - i and i < count:
        token, votes = tokens[places[i]], 0
        for j in range(i, count):
            votes += tokens[places[j]] == token
        if votes > most:
            best, most = token, votes
        i += 1
    return best, most
