"""Chosen draft lengths are optimal for any cost surface; nothing is drafted if no draft pays."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.drafting.draft_length import break_even, choose_draft_lengths, makespan_weights

SURFACES = ("flat", "linear", "steps", "noise", "convex", "infinite")


def surface(kind: str, num: int, rng: np.random.Generator) -> np.ndarray:
    extra = np.arange(num + 1, dtype=np.float64)
    if kind == "flat":
        return np.full(num + 1, 0.02)
    if kind == "linear":
        return 0.01 * (1 + extra * rng.uniform(0.01, 1))
    if kind == "steps":
        return 0.01 * (1 + np.ceil(extra / 4))
    if kind == "noise":
        return 0.01 * rng.uniform(0.5, 2, num + 1)
    if kind == "convex":
        return 0.01 * (1 + (extra / 3) ** 2)
    return np.where(extra <= 3, 0.01, np.inf)


def survivals(rng: np.random.Generator, num_rows: int, num_tokens: int) -> np.ndarray:
    return np.cumprod(rng.uniform(0.2, 1, (num_rows, num_tokens)), axis=1).astype(np.float32)


def rate(lengths, table, weights, seconds) -> float:
    emitted = sum(w * (1 + row[:n].sum(dtype=np.float64)) for w, row, n in zip(weights, table, lengths, strict=True))
    return emitted / seconds[sum(lengths)]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 4), st.integers(1, 3), st.sampled_from(SURFACES))
def test_chosen_lengths_are_optimal(seed: int, num_rows: int, num_tokens: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    table = survivals(rng, num_rows, num_tokens)
    available = rng.integers(0, num_tokens + 1, num_rows).astype(np.int32)
    weights = rng.uniform(0.25, 4, num_rows)
    seconds = surface(kind, num_rows * num_tokens, rng)
    chosen = choose_draft_lengths(table, available, weights, seconds)
    assert (chosen <= available).all() and (chosen >= 0).all()
    best = max(rate(other, table, weights, seconds) for other in itertools.product(*(range(n + 1) for n in available)))
    nothing = rate([0] * num_rows, table, weights, seconds)
    found = rate(chosen, table, weights, seconds)
    # values are known to a 128th, and a gain of a hundredth is not worth drafting
    assert found >= 0.99 * best
    assert found >= nothing * (1 - 1e-6)


def test_a_free_forward_verifies_every_token_and_an_expensive_one_none() -> None:
    table = np.full((5, 8), 0.5, dtype=np.float32)
    available = np.full(5, 8, dtype=np.int32)
    free = choose_draft_lengths(table, available, np.ones(5), np.full(41, 0.01))
    np.testing.assert_array_equal(free, available)
    dear = choose_draft_lengths(table, available, np.ones(5), 0.01 * np.arange(5, 46, dtype=np.float64))
    np.testing.assert_array_equal(dear, 0)


def test_a_row_with_more_weight_never_gets_a_shorter_draft() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        table = survivals(rng, 1, 16).repeat(6, axis=0)
        weights = np.sort(rng.uniform(0.25, 4, 6))
        seconds = 0.01 * (1 + np.arange(97) * rng.uniform(0.005, 0.2))
        chosen = choose_draft_lengths(table, np.full(6, 16, dtype=np.int32), weights, seconds)
        # equal rows of nearly equal weight may share a bin, where the first one is served first
        apart = weights[1:] > 1.02 * weights[:-1]
        assert (np.diff(chosen)[apart] >= 0).all()


def test_padding_is_filled_with_the_next_best_tokens() -> None:
    table = np.array([[0.9, 0.8], [0.3, 0.2]], dtype=np.float32)
    seconds = np.array([1.0, 1.05, 1.05, 1.05, 9.0])
    chosen = choose_draft_lengths(table, np.array([2, 2], dtype=np.int32), np.ones(2), seconds)
    assert chosen.tolist() == [2, 1]


def test_nothing_is_drafted_below_the_break_even_survival() -> None:
    seconds = 0.01 * (1 + 0.05 * np.arange(17))
    least = break_even(seconds, 8)
    assert least == pytest.approx(0.05 * 8)
    for survival, drafts in ((0.95 * least, False), (1.2 * least, True)):
        table = np.full((8, 1), survival, dtype=np.float32)
        chosen = choose_draft_lengths(table, np.ones(8, dtype=np.int32), np.ones(8), seconds)
        assert bool(chosen.any()) is drafts
    assert break_even(0.01 * (1 + 2 * np.arange(17.0)), 8) >= 1


def test_makespan_weights_are_relative_and_capped() -> None:
    np.testing.assert_allclose(makespan_weights(np.array([100.0, 200, 300]), 0.5, 4), [0.5, 1, 1.5])
    np.testing.assert_allclose(makespan_weights(np.array([1.0, 1, 1, 997]), 0.5, 3), [0.5, 0.5, 0.5, 3])
    np.testing.assert_allclose(makespan_weights(np.zeros(3), 0.5, 4), 1)
