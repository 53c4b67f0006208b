"""Intervals of differences that are taken seed by seed."""

import random

import pytest

from benchmarks.harness.paired import Difference


def test_an_interval_contains_the_mean_of_noise_in_most_cases() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        low, high = Difference.of([rng.gauss(1, 2) for _ in range(3)]).interval
        held += low <= 1 <= high
    assert 0.93 <= held / 2000 <= 0.97


def test_equal_differences_have_an_interval_without_width() -> None:
    assert Difference.of([2.0, 2.0, 2.0]).interval == pytest.approx((2.0, 2.0))
