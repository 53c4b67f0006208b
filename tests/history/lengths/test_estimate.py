"""Expected lengths agree with observed lengths, and grow beyond them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.lengths.estimate import LengthEstimate

LENGTHS = st.lists(st.integers(1, 40_000), max_size=24)


def test_the_estimate_of_many_lengths_has_the_samples_statistics() -> None:
    lengths = np.random.default_rng(0).lognormal(7, 0.9, 4000).astype(int) + 1
    found = LengthEstimate.of(lengths.tolist())
    assert found.num_observations == 4000
    assert found.mean == pytest.approx(lengths.mean(), rel=0.001)
    assert found.p50 == pytest.approx(np.quantile(lengths, 0.5), rel=0.002)
    assert found.p90 == pytest.approx(np.quantile(lengths, 0.9), rel=0.002)
    assert found.max == lengths.max()
    for emitted in (0, 500, 2000):
        rest = lengths[lengths > emitted] - emitted
        assert found.remaining(emitted) == pytest.approx(rest.mean(), rel=0.01)


def test_expected_remaining_tokens_beyond_the_longest_response_grow_in_proportion() -> None:
    found = LengthEstimate.of([100, 120, 150], prior_mean=100)
    assert found.remaining(149) < found.remaining(1000) == 500
    assert found.remaining(4000) == 2000


def test_the_estimate_without_observations_is_the_prior() -> None:
    found = LengthEstimate.of([], prior_mean=700)
    assert (found.num_observations, found.mean, found.max) == (0, 700, 0)
    assert found.remaining(0) == 700
    assert 0 < found.p50 < found.mean < found.p90


def test_the_last_visit_counts_more() -> None:
    old, new = [100] * 4, [200] * 4
    found = LengthEstimate.of(old + new, steps=[3] * 4 + [9] * 4, prior_mean=150)
    assert found.mean > 160
    assert found.p50 == 200
    assert LengthEstimate.of(new + old, steps=[9] * 4 + [3] * 4, prior_mean=150) == found


@given(LENGTHS, st.integers(0, 100_000), st.floats(1, 1e5))
def test_every_figure_is_finite_and_quantiles_rise(lengths: list[int], emitted: int, prior: float) -> None:
    found = LengthEstimate.of(lengths, prior_mean=prior)
    assert 0 < found.p50 <= found.p90
    assert not lengths or found.p90 <= found.max
    assert 0 < found.remaining(emitted) < np.inf
    emitted_n = np.array([0, emitted, emitted + 1])
    np.testing.assert_allclose(found.remaining_after(emitted_n), [found.remaining(int(n)) for n in emitted_n])


@pytest.mark.parametrize(
    ("lengths", "steps", "prior"), [([0], [], 1.0), ([5], [1, 2], 1.0), ([5], [], 0.0), ([5], [], float("nan"))]
)
def test_invalid_lengths_are_refused(lengths: list[int], steps: list[int], prior: float) -> None:
    with pytest.raises(ValueError, match=r"positive|steps"):
        LengthEstimate.of(lengths, steps=steps, prior_mean=prior)
