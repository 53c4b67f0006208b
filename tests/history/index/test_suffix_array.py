from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from history.index.suffix_array import (
    DEPTH,
    END,
    FANOUT,
    SEPARATOR,
    build_fences,
    count_below,
    fence,
    is_sorted,
    num_fences,
    sort_by_left_context,
)

RESPONSES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), max_size=6)


def joined(responses: list[list[int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([token for r in responses for token in (SEPARATOR, *r)] + [END], dtype=np.int32)


def context(tokens: np.ndarray[Any, np.dtype[np.int32]], position: int) -> list[int]:
    found: list[int] = []
    while len(found) < DEPTH and (not found or found[-1] >= 0):
        found.append(int(tokens[position - len(found)]))
    return found


@settings(max_examples=200, deadline=None)
@given(RESPONSES)
def test_the_suffix_array_equals_naive_sorting(responses: list[list[int]]) -> None:
    tokens = joined(responses)
    order = sort_by_left_context(tokens)
    assert sorted(order) == list(range(len(tokens)))
    assert [context(tokens, p) for p in order] == sorted(context(tokens, p) for p in range(len(tokens)))
    assert is_sorted(tokens, order)


def test_long_repeats_and_large_ids_are_sorted() -> None:
    generator = np.random.default_rng(0)
    base = generator.integers(0, 200_000, size=3000)
    for text in ([7] * 2000, base, base % 50, base // 1000):
        tokens = joined([list(text), list(text[:500]), list(text[100:])])
        order = sort_by_left_context(tokens)
        assert sorted(order) == list(range(len(tokens)))
        assert is_sorted(tokens, order)


def test_an_unsorted_suffix_array_is_detected() -> None:
    tokens = joined([[1, 2, 3, 1, 2, 4]])
    order = sort_by_left_context(tokens)
    for i in range(len(order) - 1):
        swapped = order.copy()
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        assert not is_sorted(tokens, swapped)


def test_fences_sort_like_contexts() -> None:
    triples = [(a, b, c) for a in (-2, -1, 0, 5, 1 << 20) for b in (-1, 0, 5) for c in (-1, 0, 1 << 20)]
    large = [fence(1 << 22, 5, 7), fence(1 << 23, -1, 0), fence(1 << 30, 1 << 30, 1)]
    assert large[0] == large[1] == large[2] > max(fence(*triple) for triple in triples)
    for one in triples:
        for other in triples:
            cut = [t[: 1 + next((i for i in range(3) if t[i] < 0), 2)] for t in (one, other)]
            assert (fence(*one) < fence(*other)) == (cut[0] < cut[1])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(1, 40), st.integers(0, 1 << 30))
def test_the_search_tree_gives_the_counts_of_a_scan(length: int, vocabulary: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    tokens = joined([list(generator.integers(0, vocabulary, size=length))])
    order = sort_by_left_context(tokens)
    fences = build_fences(tokens, order)
    assert len(fences) == num_fences(len(tokens))
    widest = [fence(*[*context(tokens, p), 0, 0][:3]) for p in order[::FANOUT]]
    keys = [fence(*generator.integers(-1, vocabulary, size=3)) for _ in range(20)]
    for key in [*keys, *widest, 0, 1 << 62]:
        assert count_below(fences, len(tokens), key) == sum(one < key for one in widest)


def test_a_segment_takes_at_most_ten_bytes_a_token() -> None:
    for length in (1000, 16_000, 131_072):
        assert 4 * length + 4 * length + 8 * num_fences(length) < 9.4 * length + 256
