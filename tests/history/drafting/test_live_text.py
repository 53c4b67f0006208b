"""Live text against a plain list of its tokens in order."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.drafting.live_text import (
    BUCKET,
    BY_ONE_AND_THREE,
    BY_ONE_THREE_FIVE,
    BY_THREE,
    FIVE,
    append,
    newest_places,
    reindex,
)
from history.drafting.prompt_group import DraftGroup
from history.drafting.realign import REACH, realign
from history.drafting.state import BUCKETS, LIVE_SIZE, LIVE_TEXT, NUM_BUCKETS, NUM_GROUP_COLUMNS
from history.index.suffix_array import SEPARATOR

NUM_BUCKET = 1 << 18
"""Contexts that share a bucket push each other out; in so many buckets the few of an example do not."""
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=5)


class Naive:
    """Texts of regions, and all positions with a successor, in the order in which they got it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def append(self, start: int, tokens: list[int], region: list[int]) -> None:
        for token in tokens:
            if region:
                self.seen.append((start + len(region) - 1, [SEPARATOR, *region]))
            region.append(token)

    def newest(self, output: list[int], contexts: int) -> tuple[list[int], int]:
        context = [SEPARATOR, *output][::-1]
        known = [(position, text[::-1]) for position, text in reversed(self.seen)]
        sizes = [3, 1]
        if contexts == BY_ONE_THREE_FIVE and len(output) >= FIVE:
            sizes = [FIVE, 3, 1]
        elif contexts == BY_THREE:
            sizes = [3]
        known = next(
            (alike for n in sizes if (alike := [(p, c) for p, c in known if c[:n] == context[:n]][:BUCKET])), []
        )
        most = FIVE if contexts == BY_ONE_THREE_FIVE else len(context)
        equal = {
            p: next((i for i in range(min(len(c), most)) if c[: i + 1] != context[: i + 1]), min(len(c), most))
            for p, c in known
        }
        best = max(equal.values(), default=0)
        return [p + 1 for p, _ in known if equal[p] == best], best


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(0, 1 << 30), st.sampled_from([BY_THREE, BY_ONE_AND_THREE, BY_ONE_THREE_FIVE]))
def test_the_newest_positions_equal_those_of_a_list(texts: list[list[int]], seed: int, contexts: int) -> None:
    generator = np.random.default_rng(seed)
    live = np.full(2 + 30 * len(texts), SEPARATOR, dtype=np.int32)
    buckets = np.full((NUM_BUCKET, BUCKET), -1, dtype=np.int32)
    naive, regions = Naive(), [[] for _ in texts]
    ends = [2 + 30 * i + 1 for i in range(len(texts))]
    while any(len(regions[i]) < len(text) for i, text in enumerate(texts)):
        i = int(generator.integers(len(texts)))
        more = texts[i][len(regions[i]) : len(regions[i]) + int(generator.integers(1, 5))]
        naive.append(2 + 30 * i + 1, more, regions[i])
        ends[i] = append(live, buckets, ends[i], np.array(more, dtype=np.int32), 0, len(more), contexts)
        assert live[ends[i]] == SEPARATOR
        for output in [region for region in regions if region]:
            text = np.array(output, dtype=np.int32)
            places = np.zeros(BUCKET, dtype=np.int32)
            count, matched = newest_places(live, buckets, text, len(text) - 1, len(text), contexts, places)
            expected, best = naive.newest(output, contexts)
            assert places[:count].tolist() == expected
            assert matched == best or not expected


@pytest.mark.parametrize("contexts", [BY_THREE, BY_ONE_AND_THREE, BY_ONE_THREE_FIVE])
def test_indexing_again_keeps_the_newest_positions_of_a_single_region(contexts: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 6, size=400).astype(np.int32)
    live = np.full(500, SEPARATOR, dtype=np.int32)
    buckets = np.full((NUM_BUCKET, BUCKET), -1, dtype=np.int32)
    append(live, buckets, 1, tokens, 0, len(tokens), contexts)
    again = np.full((NUM_BUCKET, BUCKET), -1, dtype=np.int32)
    reindex(live, again, 500, contexts)
    assert np.array_equal(again, buckets)


def test_regions_of_a_group_are_disjoint_and_have_the_announced_length() -> None:
    group = DraftGroup(prompt_key=1, prompt_length=5, region_size=12, step=0)
    regions = [group.add_region() for _ in range(20)]
    assert all(stop - start == 10 for start, stop in regions)
    assert all(after[0] - before[1] == 2 for before, after in pairwise(regions))
    row = np.zeros(NUM_GROUP_COLUMNS, dtype=np.int64)
    group.write(row)
    assert row[LIVE_TEXT] and row[BUCKETS] and row[LIVE_SIZE] > regions[-1][1]
    before = row[NUM_BUCKETS]
    group.rehash()
    group.write(row)
    assert row[NUM_BUCKETS] > before


def test_a_cursor_moves_to_the_best_match_of_the_newest_tokens_within_its_response() -> None:
    tokens = np.array([SEPARATOR, 50, 51, SEPARATOR, *range(10, 40), SEPARATOR, 60, 61, -2], dtype=np.int32)

    def shift(cursor: int, *newest: int) -> tuple[int, int]:
        text = np.array([99, *newest], dtype=np.int32)
        return realign(tokens, cursor, text, len(text) - 1, len(text))

    at = 4 + 15
    assert tokens[at] == 25
    assert shift(at, 27, 28) == (4, 2)
    assert shift(at, 20, 21) == (-3, 2)
    assert shift(at, 77, 77) == (0, 0)
    assert shift(at, tokens[at + REACH - 1]) == (REACH, 1)
    assert shift(at, tokens[at + REACH]) == (0, 0)
    assert shift(5, 51) == (0, 0)
    assert shift(33, 60) == (0, 0)
