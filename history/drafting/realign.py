"""Keeps the place in a past response that a text has been following, across tokens that differed.

A response that repeats an old one with an edit is found again by its context only some tokens after the
edit. The cursor stays where it was and assumes that tokens were replaced one for one; when the newest tokens
fit better a few places to the left (something was inserted) or right (something was left out), it moves.
"""

from history.index.search import num_equal
from history.jit import kernel
from history.types import TokenIds

REACH = 8
"""Tokens to either side in which a lost cursor looks."""

_MAX_COMPARED = 8
"""Tokens of context that decide where it fits best."""


@kernel
def realign(tokens: TokenIds, cursor: int, text: TokenIds, last: int, limit: int) -> tuple[int, int]:
    """Where next to `cursor` (the token expected next) the newest tokens fit best: shift, and tokens that fit there.

    Never looks beyond the response that the cursor is in; of equal fits the nearest.
    """
    shift, best = 0, 0
    limit = min(limit, _MAX_COMPARED)
    left, right = tokens[cursor - 1] >= 0, True
    for distance in range(1, REACH + 1):
        position = cursor + distance - 1
        right = right and tokens[position] >= 0
        if right and tokens[position] == text[last]:
            equal = num_equal(tokens, position, text, last, limit)
            if equal > best:
                shift, best = distance, equal
        position = cursor - distance - 1
        left = left and tokens[position] >= 0
        if left and tokens[position] == text[last]:
            equal = num_equal(tokens, position, text, last, limit)
            if equal > best:
                shift, best = -distance, equal
    return shift, best
