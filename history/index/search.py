"""Finds positions of past responses whose context matches the newest tokens of a request, and reads what follows.

The *context* of a position is its token and the tokens before it, back to the separator before its response. The
separator belongs to the context: the beginning of a response matches beginnings only. Tokens of the prompt or of the
response before are never compared.

The search goes through the segment's fences, then compares the few positions around the end of the search. A fence is
every 8th context in sorted order, its first three tokens packed into one number.
"""

import numpy as np
import numpy.typing as npt

from history.index.suffix_array import DEPTH, FANOUT, SEPARATOR, Fences, Order, count_below, fence, num_last_fences
from history.jit import kernel
from history.types import TokenIds

WINDOW = 32
"""Most positions of a segment that are compared token by token."""

_FEW = 4
"""Equal fences that are counted one by one; more are found by a second search."""


@kernel
def num_equal(tokens: TokenIds, position: int, text: TokenIds, last: int, limit: int) -> int:
    """Count the tokens that the contexts of `position` in `tokens` and of `last` in `text` share.

    `limit` tokens of `text` up to `last` belong to the response. If all of them are equal and the response in `tokens`
    begins at the same place, the beginning counts as one more token.
    """
    for i in range(min(limit, DEPTH)):
        if tokens[position - i] != text[last - i]:
            return i
    if limit < DEPTH and tokens[position - limit] == SEPARATOR:
        return limit + 1
    return min(limit, DEPTH)


@kernel
def context_fence(text: TokenIds, last: int, limit: int) -> int:
    """Pack the first three tokens of the context of `last` as fences do."""
    return fence(
        text[last] if limit > 0 else SEPARATOR,
        text[last - 1] if limit > 1 else SEPARATOR,
        text[last - 2] if limit > 2 else SEPARATOR,
    )


@kernel
def window(fences: Fences, num_tokens: int, key: int, first: int) -> tuple[int, int]:
    """Find the range of a segment's order that holds all contexts beginning with the three tokens of `key`.

    If no context begins with them, the range holds the neighbours on both sides; one of them matches longest. `first`
    is the number of fences smaller than `key` (`count_below`).
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
    """Narrow begin..end to at most `WINDOW` positions around the sorted place of the context of `last`."""
    low, high = begin, end
    while high - low > 1:
        middle = (low + high) >> 1
        position = order[middle]
        equal = num_equal(tokens, position, text, last, limit)
        token = text[last - equal] if equal < limit else SEPARATOR
        if equal <= limit and equal < DEPTH and tokens[position - equal] < token:
            low = middle
        else:
            high = middle
    return max(low - WINDOW // 4, begin), min(low + 3 * WINDOW // 4, end)


@kernel
def best_places(
    tokens: TokenIds, order: Order, begin: int, end: int, text: TokenIds, last: int, limit: int, places: TokenIds
) -> tuple[int, int]:
    """Write the positions after the longest matches among order[begin:end] into `places`.

    Returns the number of places (at most len(places)) and the number of matching tokens.
    """
    best, count = 1, 0
    for i in range(begin, end):
        position = order[i]
        equal = num_equal(tokens, position, text, last, limit)
        if equal < best and count > 0:
            break  # contexts are sorted, so the longest matches are neighbours
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
    """Write the majority continuation of `places` into `chain` [K], token by token; places that differ drop out.

    `votes` [K, 2] receives, for each token, the places that agree and the places that were still in. A chain ends
    before the end of a response. Overwrites `places`.

    Returns the chain's length and the start of the place that agrees with the chain longest.
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
    """Return the token of most places (the first of equals) and the number of its places."""
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
