"""Finds where a prompt's past responses continue as the text does now: the longest match of its end in a segment.

Texts end like a context (`history.suffix_array`): the tokens of this response, newest first, then the
separator, so that the beginning of a response matches the beginnings of past ones and nothing before.
"""

import numpy as np
import numpy.typing as npt

from history.kernel import kernel
from history.suffix_array import DEPTH, SEPARATOR, Order
from history.types import TokenIds


@kernel
def symbol(text: TokenIds, length: int, prompt_length: int, depth: int) -> int:
    """The context of text[:length] at `depth`: 0 is its newest token, behind its response is the separator."""
    position = length - 1 - depth
    return text[position] if position >= prompt_length else SEPARATOR


@kernel
def compare(tokens: TokenIds, position: int, text: TokenIds, length: int, prompt_length: int) -> tuple[int, int]:
    """Sign of (context of `position`) - (context of the text), and how many tokens are equal."""
    for depth in range(DEPTH):
        mine = tokens[position - depth]
        theirs = symbol(text, length, prompt_length, depth)
        if mine != theirs:
            return (1 if mine > theirs else -1), depth
        if mine < 0:
            return 0, depth + 1
    return 0, DEPTH


@kernel
def longest_match(
    tokens: TokenIds, order: Order, text: TokenIds, length: int, prompt_length: int, found: npt.NDArray[np.int32]
) -> tuple[int, int]:
    """Places after which the longest match of text[:length] continues, into `found`.

    Returns how many were found (at most len(found)) and how many tokens match (separator included).
    """
    low, high = 0, len(order)
    best = 0
    at = 0
    while low < high:
        middle = (low + high) >> 1
        sign, equal = compare(tokens, order[middle], text, length, prompt_length)
        if equal > best:
            best, at = equal, middle
        if sign < 0:
            low = middle + 1
        else:
            high = middle
    if best == 0:
        return 0, 0
    count = 0
    i = at
    while i < len(order) and count < len(found):
        if i != at and compare(tokens, order[i], text, length, prompt_length)[1] < best:
            break
        found[count] = order[i] + 1
        count += 1
        i += 1
    i = at - 1
    while i >= 0 and count < len(found):
        if compare(tokens, order[i], text, length, prompt_length)[1] < best:
            break
        found[count] = order[i] + 1
        count += 1
        i -= 1
    return count, best


@kernel
def follow(
    tokens: TokenIds,
    found: npt.NDArray[np.int32],
    count: int,
    room: int,
    chain: TokenIds,
    shares: npt.NDArray[np.float32],
) -> int:
    """What most of the places found say next, token by token, into `chain`; its length.

    `shares` [K]: how large a part of those that agreed with the chain so far says its token. Places that
    differ leave; `found` is used up. A chain ends before the end of a response.
    """
    for k in range(room):
        best, best_votes, voters = SEPARATOR, 0, 0
        for i in range(count):
            token = tokens[found[i]]
            voters += 1
            votes = 0
            for j in range(count):
                votes += tokens[found[j]] == token
            if votes > best_votes:
                best, best_votes = token, votes
        if best < 0:
            return k
        chain[k] = best
        shares[k] = best_votes / voters
        kept = 0
        for i in range(count):
            if tokens[found[i]] == best:
                found[kept] = found[i] + 1
                kept += 1
        count = kept
    return room
