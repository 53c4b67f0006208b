"""How likely a draft token is to be accepted, learned from what the engine emits.

One table of counts: a *cell* is what is known of a draft token beforehand: which candidate says it, how
many tokens of context match, how the places agree, how deep in the draft it stands, how many other candidates
say the same so far and how many do not. Its rate is the share of such tokens that were accepted, given
that the tokens before them were. Every candidate is scored against what was emitted, also those that were
not drafted and what was cut off (shadow feedback), each token once.

The product of rates along a draft is corrected by a second table, of how often drafts of such a candidate and
with such a product did survive that deep: it takes back what is lost by choosing the best of several estimates,
and what rates cannot know of each other. Counts are halved when full, so both tables follow a policy that changes,
and siblings that know more and more.

Origins: how old a past response is and what it was worth, as a feature of acceptance.

Responses that a policy gave long ago, or that it was taught to avoid, are repeated less. How much less is not a
rule but learned: of each *origin* (age and worth), how often its tokens were rejected over how often their cells said
they would be. That quotient scales the chance of rejection of a token that is drafted from there. Two features in a
table of their own, so that cells do not get rarer.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from history.jit import kernel

NUM_CANDIDATES = 5
NUM_DEPTHS = 8
NUM_BINS = 20
"""Of predicted survival, in the correction and in the reported calibration."""

_MATCHES = 12
_AGREEMENTS = 10
_RELATIONS = 6
_SHAPE = (NUM_CANDIDATES, _MATCHES, _AGREEMENTS, NUM_DEPTHS, _RELATIONS)
NUM_CORRECTIONS = NUM_CANDIDATES * NUM_DEPTHS * NUM_BINS
NUM_CELLS = NUM_CANDIDATES * _MATCHES * _AGREEMENTS * NUM_DEPTHS * _RELATIONS

_FULL = 1024.0
_PRIOR_WEIGHT = 1.5
_FIRST_PRIOR = (0.4, 0.8, 0.9, 0.2, 0.7, 0.85)
"""Rate of a draft's first token, by relation to the other candidates."""
_LATER_PRIOR = (0.8, 0.9, 0.95, 0.8, 0.85, 0.9)
_MINORITY_PRIOR = (0.9, 0.7, 0.6, 0.5, 0.25, 0.15)
"""Factor for places that do not agree, by bin of agreement from 4 on."""

_CORRECTION_FULL = 256.0
_CORRECTION_WEIGHT = 15.0

Counts = npt.NDArray[np.float32]
Rates = npt.NDArray[np.float32]


@kernel
def cell(candidate: int, match: int, agreement: int, depth: int, relation: int) -> int:
    """The cell of a draft token, from bins."""
    return (((candidate * _MATCHES + match) * _AGREEMENTS + agreement) * NUM_DEPTHS + depth) * _RELATIONS + relation


@kernel
def match_bin(num_tokens: int) -> int:
    """0..11 for tokens of context that match: one by one at first, then in ever wider steps."""
    if num_tokens <= 6:
        return max(num_tokens - 1, 0)
    for i, most in enumerate((8, 11, 16, 24, 40)):
        if num_tokens <= most:
            return 6 + i
    return 11


@kernel
def agreement_bin(votes: int, voters: int) -> int:
    """0..9: unanimous of one, two, few, many; then ever smaller majorities."""
    if votes == voters:
        return 0 if voters == 1 else (1 if voters == 2 else (2 if voters <= 4 else 3))
    share = votes / voters
    for i, least in enumerate((0.75, 0.6, 0.5, 0.35, 0.2)):
        if share >= least:
            return 4 + i
    return 9


@kernel
def depth_bin(k: int) -> int:
    """0..7 for the k-th token of a draft."""
    if k < 4:
        return k
    return 4 if k < 6 else (5 if k < 8 else (6 if k < 12 else 7))


@kernel
def relation_bin(num_same: int, num_other: int) -> int:
    """0..5 for how many other candidates say the same up to here, and how many say something else."""
    return min(num_same, 2) + 3 * min(num_other, 1)


@kernel
def update_rate(counts: Counts, rates: Rates, where: int, accepted: bool) -> None:
    """One more token of a cell was accepted or was not."""
    if counts[where, 1] >= _FULL:
        counts[where, 0] *= 0.5
        counts[where, 1] *= 0.5
    counts[where, 0] += 1.0 if accepted else 0.0
    counts[where, 1] += 1.0
    rates[where] = counts[where, 0] / counts[where, 1]


@kernel
def survival_bin(survival: float) -> int:
    """0..19"""
    return min(int(survival * NUM_BINS), NUM_BINS - 1)


@kernel
def update_correction(
    sums: Counts, corrections: Rates, candidate: int, depth: int, predicted: float, survived: bool
) -> None:
    """One more drafted token, whose product of rates was `predicted`, survived or did not."""
    where = (candidate * NUM_DEPTHS + depth) * NUM_BINS + survival_bin(predicted)
    if sums[where, 1] >= _CORRECTION_FULL:
        sums[where, 0] *= 0.5
        sums[where, 1] *= 0.5
    sums[where, 0] += (1.0 if survived else 0.0) - predicted
    sums[where, 1] += 1.0
    corrections[where] = sums[where, 0] / sums[where, 1]


@kernel
def corrected(corrections: Rates, candidate: int, depth: int, predicted: float) -> float:
    """Survival of a token by both tables."""
    survival = predicted + corrections[(candidate * NUM_DEPTHS + depth) * NUM_BINS + survival_bin(predicted)]
    return float(min(max(survival, 0.0), 1.0))


@kernel
def make_non_increasing(survivals: Rates, length: int) -> None:
    """Make survivals[:length] never rise, as survival cannot: what does becomes the mean of its run.

    Least squares (pool adjacent violators). To cut it off instead would lower every estimate that errs upwards and none
    that errs downwards.
    """
    for k in range(1, length):
        begin, value = k, survivals[k]
        while begin > 0 and survivals[begin - 1] < value:
            first = begin - 1
            while first > 0 and survivals[first - 1] == survivals[begin - 1]:
                first -= 1
            value = (survivals[begin - 1] * (begin - first) + value * (k + 1 - begin)) / (k + 1 - first)
            begin = first
        for i in range(begin, k + 1):
            survivals[i] = value


def fresh_counts() -> Counts:
    """[NUM_CELLS, 2] accepted and all: nothing but a weak prior, which decides in an engine's first forwards."""
    rates = np.empty(_SHAPE)
    rates[:] = np.array(_LATER_PRIOR)
    rates[:, :, :, 0] = np.array(_FIRST_PRIOR)
    rates[:3, :, 4:] *= np.array(_MINORITY_PRIOR)[:, None, None]
    counts = np.stack([_PRIOR_WEIGHT * rates.reshape(-1), np.full(NUM_CELLS, _PRIOR_WEIGHT)], axis=1)
    return counts.astype(np.float32)


def fresh_corrections() -> Counts:
    """[NUM_CORRECTIONS, 2] what survival was above its prediction, summed, and how often: nothing yet, often."""
    sums = np.zeros((NUM_CORRECTIONS, 2), dtype=np.float32)
    sums[:, 1] = _CORRECTION_WEIGHT
    return sums


LIVING, ELSEWHERE = 0, 1
"""Origins of this step's own text, and of other prompts' texts."""

_NUM_AGES, _NUM_WORTHS = 8, 4
NUM_ORIGINS = 2 + _NUM_AGES * _NUM_WORTHS

_ORIGIN_FULL = 256.0
_WEIGHT = 10.0
"""Rejections that are as good as none: until an origin has been seen more often, it makes little difference."""
_LEAST, _MOST = 0.25, 4.0

Sums = npt.NDArray[np.float32]
Scales = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int32]


def origins(steps: Sequence[int], rewards: Sequence[float], now: int) -> Numbers:
    """Origin of each response of a prompt, [R].

    Args:
        steps: [R], that they were sampled for.
        rewards: [R], NaN where it is not known; a response's worth is whether it had more than the mean.
        now: the step that is drafted for.
    """
    if len(steps) == 0:
        return np.zeros(0, dtype=np.int32)
    # 0 for this step, then 1, 2-3, 4-7, ..; steps of another run are negative, and old
    ages = np.minimum(np.ceil(np.log2(np.maximum(now - np.asarray(steps, dtype=np.int64), 0) + 1)), _NUM_AGES - 1)
    paid = np.asarray(rewards, dtype=np.float64)
    known = ~np.isnan(paid)
    worths = np.zeros(len(paid), dtype=np.int64)
    if known.any():
        mean = paid[known].mean()
        worths[known] = 2 + np.sign(np.where(np.isclose(paid, mean), 0.0, paid - mean))[known].astype(np.int64)
    found: Numbers = (2 + ages.astype(np.int64) * _NUM_WORTHS + worths).astype(np.int32)
    return found


@kernel
def origin_at(responses: Numbers, position: int) -> int:
    """The origin of the response that `position` of a segment's tokens is in.

    `responses` [2 R] holds the starts of a segment's responses, which ascend, then their origins.
    """
    size = len(responses) >> 1
    number = -1
    for i in range(size):  # no branches: a vector instruction or two
        number += responses[i] <= position
    return int(responses[size + number])


@kernel
def scaled(rate: float, scale: float) -> float:
    """A cell's rate for an origin with that scale."""
    return float(max(1.0 - (1.0 - rate) * scale, 0.0))


@kernel
def update_origin(sums: Sums, scales: Scales, origin: int, rejection: float, rejected: bool) -> None:
    """One more chain from `origin`, up to what was rejected of it.

    Args:
        sums: [NUM_ORIGINS, 2], rejections and how many were expected.
        scales: [NUM_ORIGINS]
        origin: of the chain.
        rejection: sum of the probabilities of rejection that the cells of these tokens said.
        rejected: whether the last of them was; the others were not.
    """
    if sums[origin, 1] >= _ORIGIN_FULL:
        sums[origin, 0] *= 0.5
        sums[origin, 1] *= 0.5
    sums[origin, 0] += 1.0 if rejected else 0.0
    sums[origin, 1] += rejection
    scale = (sums[origin, 0] + _WEIGHT) / (sums[origin, 1] + _WEIGHT)
    scales[origin] = min(max(scale, _LEAST), _MOST)
