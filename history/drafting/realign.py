"""Realigns the cursor in a past response after an edit.

A response often repeats an old one with edits. A context search finds the old response again only some tokens after the
edit. The cursor stays and assumes that tokens were replaced one for one. If the newest tokens match better some
positions to the left (an insertion) or to the right (a deletion), the cursor moves.
"""

from history.index.search import num_equal
from history.jit import kernel
from history.types import TokenIds

REACH = 8
"""Largest shift of a lost cursor, in tokens."""

_MAX_COMPARED = 8
"""Tokens of context that are compared."""


@kernel
def realign(tokens: TokenIds, cursor: int, text: TokenIds, last: int, limit: int) -> tuple[int, int]:
    """Return the shift of `cursor` (the token expected next) with the longest match, and the matching tokens.

    The search stays inside the cursor's response. Of equal matches the nearest wins.
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
