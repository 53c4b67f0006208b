"""The longest match and what follows it, against references that look at every position."""

from collections import Counter

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from history.index.search import WINDOW, best_places, context_fence, follow, narrowed, num_equal, window
from history.index.segment import HistorySegment, build_segment
from history.index.suffix_array import DEPTH, SEPARATOR, count_below
from history.types import PastResponse

MAX_PLACES = 8
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=50)


def segment_of(responses: list[list[int]]) -> HistorySegment:
    past = [PastResponse(token_ids=np.array(r, dtype=np.int32), step=0, sample=i) for i, r in enumerate(responses)]
    return build_segment(1, 1, past)


def find(segment: HistorySegment, prompt: list[int], output: list[int]) -> tuple[list[int], int]:
    """Positions and match length as computed by the drafter."""
    text = np.array(prompt + output, dtype=np.int32)
    last, limit = len(text) - 1, len(output)
    tokens, order = segment.tokens, segment.order
    key = context_fence(text, last, limit)
    begin, end = window(segment.fences, len(tokens), key, count_below(segment.fences, len(tokens), key))
    if end - begin > WINDOW:
        begin, end = narrowed(tokens, order, begin, end, text, last, limit)
    places = np.zeros(MAX_PLACES, dtype=np.int32)
    count, matched = best_places(tokens, order, begin, end, text, last, limit, places)
    return sorted(places[:count].tolist()), matched


def naive(segment: HistorySegment, output: list[int]) -> tuple[list[int], int]:
    """All positions after the longest match, and its length; the start of a response counts as a token."""
    context = ([SEPARATOR, *output])[::-1][:DEPTH]
    matches = {}
    for position in range(len(segment.tokens)):
        equal = 0
        while equal < len(context) and equal <= position and segment.tokens[position - equal] == context[equal]:
            equal += 1
        matches[position + 1] = equal
    best = max(matches.values())
    return [place for place, equal in matches.items() if equal == best], best


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=6), TEXTS, st.lists(st.integers(0, 3), max_size=3))
@example([[1, 2, 3]], [1], [])
@example([[0] * 50] * 6, [0] * 40, [])
@example([[1]], [2], [1])
@example([], [1], [])
def test_the_longest_match_equals_that_of_a_scan(
    responses: list[list[int]], output: list[int], prompt: list[int]
) -> None:
    segment = segment_of(responses)
    found, matched = find(segment, prompt, output)
    expected, best = naive(segment, output)
    if best == 0:
        assert found == []
        return
    assert matched == best
    assert found
    assert set(found) <= set(expected)
    if len(expected) <= MAX_PLACES and matched >= 3:
        assert found == expected


def test_all_response_starts_match_before_the_first_token() -> None:
    segment = segment_of([[4, 5], [4, 6]])
    assert find(segment, [9, 9], []) == ([1, 4], 1)


def test_prompt_tokens_are_never_matched() -> None:
    segment = segment_of([[7, 8, 5, 6]])
    assert find(segment, [7, 8], [5]) == ([4], 1)


def test_large_ids_in_the_same_fence_are_distinguished() -> None:
    large = (1 << 21) + 5
    segment = segment_of([[large + i, large + i + 1, i] for i in range(40)])
    assert find(segment, [], [1, large + 7, large + 8]) == ([3 + 4 * 7], 2)


def test_a_match_ends_at_the_maximum_depth() -> None:
    segment = segment_of([list(range(100))])
    found, matched = find(segment, [5], [7, *range(1, 90)])
    assert (found, matched) == ([91], DEPTH)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(0, 1 << 30), st.integers(1, 8))
def test_a_chain_follows_the_majority_of_matching_positions(text: list[int], seed: int, count: int) -> None:
    tokens = np.array([SEPARATOR, *text, SEPARATOR], dtype=np.int32)
    places = np.random.default_rng(seed).integers(1, len(tokens), size=count).astype(np.int32)
    chain, votes = np.zeros(6, dtype=np.int32), np.zeros((6, 2), dtype=np.int32)
    agreeing, expected, expected_votes = places.tolist(), [], []
    while len(expected) < 6:
        ballots = Counter(int(tokens[place]) for place in agreeing)
        token = next(int(tokens[p]) for p in agreeing if ballots[int(tokens[p])] == max(ballots.values()))
        if token < 0:
            break
        expected.append(token)
        expected_votes.append([ballots[token], len(agreeing)])
        agreeing = [place + 1 for place in agreeing if tokens[place] == token]
    length, anchor = follow(tokens, places.copy(), count, chain, votes)
    assert chain[:length].tolist() == expected
    assert votes[:length].tolist() == expected_votes
    assert tokens[anchor : anchor + length].tolist() == expected
    assert anchor in places


def test_contexts_are_compared_over_the_length_that_both_responses_have() -> None:
    tokens = np.array([SEPARATOR, 1, 2, 3], dtype=np.int32)
    text = np.array([9, 1, 2, 3], dtype=np.int32)
    assert num_equal(tokens, 3, text, 3, 3) == 4
    assert num_equal(tokens, 3, text, 3, 4) == 3
    assert num_equal(tokens, 2, text, 3, 3) == 0
