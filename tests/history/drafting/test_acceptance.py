import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.drafting.acceptance import (
    NUM_CANDIDATES,
    NUM_CELLS,
    NUM_CORRECTIONS,
    NUM_DEPTHS,
    agreement_bin,
    cell,
    corrected,
    depth_bin,
    fresh_corrections,
    fresh_counts,
    make_non_increasing,
    match_bin,
    relation_bin,
    update_correction,
    update_rate,
)

MATCHES = sorted({match_bin(n) for n in range(200)})
AGREEMENTS = sorted({agreement_bin(a, b) for b in range(1, 20) for a in range(1, b + 1)})
DEPTHS = sorted({depth_bin(k) for k in range(128)})
RELATIONS = sorted({relation_bin(a, b) for a in range(4) for b in range(4 - a)})


def test_every_combination_of_bins_has_a_cell_of_its_own() -> None:
    cells = {
        cell(candidate, match, agreement, depth, relation)
        for candidate in range(NUM_CANDIDATES)
        for match in MATCHES
        for agreement in AGREEMENTS
        for depth in DEPTHS
        for relation in RELATIONS
    }
    assert cells == set(range(NUM_CELLS))


def test_bins_rise_with_their_features() -> None:
    assert [match_bin(n) for n in range(100)] == sorted(match_bin(n) for n in range(100))
    assert [depth_bin(k) for k in range(100)] == sorted(depth_bin(k) for k in range(100))
    assert len(DEPTHS) == NUM_DEPTHS
    minorities = [agreement_bin(votes, 19) for votes in range(1, 19)]
    assert minorities == sorted(minorities, reverse=True)
    assert agreement_bin(1, 1) < agreement_bin(2, 2) < agreement_bin(3, 3) < agreement_bin(8, 8) < min(minorities)


def test_a_rate_converges_to_the_accepted_share_and_follows_a_change() -> None:
    counts = fresh_counts()
    rates = counts[:, 0] / counts[:, 1]
    assert ((rates > 0) & (rates < 1)).all()
    generator = np.random.default_rng(0)
    for share in (0.3, 0.9):
        for accepted in generator.random(40_000) < share:
            update_rate(counts, rates, 5, bool(accepted))
        assert abs(rates[5] - share) < 0.03
    assert counts[5, 1] <= 4096


def test_the_correction_converges_to_the_observed_survival() -> None:
    sums = fresh_corrections()
    corrections = np.zeros(NUM_CORRECTIONS, dtype=np.float32)
    generator = np.random.default_rng(1)
    seen = []
    for survived in generator.random(20_000) < 0.2:
        update_correction(sums, corrections, 1, 2, 0.72, bool(survived))
        seen.append(corrected(corrections, 1, 2, 0.72))
    assert 0.65 < seen[0] < 0.73, "one token says little"
    assert abs(np.mean(seen[2000:]) - 0.2) < 0.005
    assert corrected(corrections, 1, 3, 0.72) == pytest.approx(0.72)
    assert corrected(corrections, 1, 2, 0.999) <= 1.0
    corrections[:] = -1.0
    assert corrected(corrections, 1, 2, 0.72) == 0.0


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=32))
def test_rising_survivals_are_averaged_to_the_nearest_falling_ones(values: list[float]) -> None:
    found = np.array([*values, 0.5], dtype=np.float32)
    make_non_increasing(found, len(values))
    assert found[-1] == 0.5, "nothing behind the end is touched"
    assert (np.diff(found[:-1]) <= 1e-6).all()
    # the closed form of isotonic regression: the least, over beginnings, of the largest mean up to an end
    sums = np.concatenate([[0.0], np.cumsum(values)])
    for k in range(len(values)):
        best = min(
            max((sums[end] - sums[begin]) / (end - begin) for end in range(k + 1, len(values) + 1))
            for begin in range(k + 1)
        )
        assert found[k] == pytest.approx(best, abs=1e-5)
