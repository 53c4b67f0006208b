import numpy as np

from history.acceptance import (
    NUM_CANDIDATES,
    NUM_CELLS,
    NUM_CORRECTIONS,
    NUM_DEPTHS,
    agreement_bin,
    cell,
    corrected,
    depth_bin,
    fresh_counts,
    match_bin,
    relation_bin,
    score,
    score_correction,
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


def test_bins_follow_what_they_bin() -> None:
    assert [match_bin(n) for n in range(100)] == sorted(match_bin(n) for n in range(100))
    assert [depth_bin(k) for k in range(100)] == sorted(depth_bin(k) for k in range(100))
    assert len(DEPTHS) == NUM_DEPTHS
    minorities = [agreement_bin(votes, 19) for votes in range(1, 19)]
    assert minorities == sorted(minorities, reverse=True)
    assert agreement_bin(1, 1) < agreement_bin(2, 2) < agreement_bin(3, 3) < agreement_bin(8, 8) < min(minorities)


def test_a_rate_goes_to_the_share_accepted_and_follows_a_change() -> None:
    counts = fresh_counts()
    rates = counts[:, 0] / counts[:, 1]
    assert ((rates > 0) & (rates < 1)).all()
    generator = np.random.default_rng(0)
    for share in (0.3, 0.9):
        for accepted in generator.random(40_000) < share:
            score(counts, rates, 5, bool(accepted))
        assert abs(rates[5] - share) < 0.03
    assert counts[5, 1] <= 4096


def test_the_correction_takes_back_a_biased_prediction_and_survival_never_rises() -> None:
    sums = np.zeros((NUM_CORRECTIONS, 2), dtype=np.float32)
    corrections = np.zeros(NUM_CORRECTIONS, dtype=np.float32)
    generator = np.random.default_rng(1)
    for survived in generator.random(20_000) < 0.6:
        score_correction(sums, corrections, 1, 2, 0.72, bool(survived))
    assert abs(corrected(corrections, 1, 2, 0.72, 1.0) - 0.6) < 0.02
    assert (
        corrected(corrections, 1, 3, 0.72, 1.0) == np.float32(0.72)
        or abs(corrected(corrections, 1, 3, 0.72, 1.0) - 0.72) < 1e-6
    )
    assert corrected(corrections, 1, 2, 0.72, 0.4) == 0.4
