"""Estimates the probability that a draft token is accepted, from the emitted tokens.

A *cell* combines five features of a draft token: its candidate, the length of the matching context, the agreement of
the places, the depth in the draft, and the other candidates that agree or disagree. The rate of a cell is
the share of its tokens that were accepted, given that the tokens before them were. All candidates are compared with the
emitted tokens, including candidates that were not drafted and tokens that were cut off (shadow feedback). Each token
counts once.

The product of rates along a draft estimates survival. A second table corrects it by the observed survival of drafts
with the same candidate, depth and product. The correction removes the bias of choosing the best of several estimates
and the dependence between rates. Counts are halved when full, so both tables follow a changing policy and a growing
living text.

Origins: age and reward of a past response, as a feature of acceptance. A policy repeats old or badly rewarded responses
less often. For each *origin* (age and reward), the quotient of observed and expected rejections is learned. The
quotient scales the rejection probability of tokens drafted from this origin. Origins have a table of their own, so
that cells keep enough observations.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from history.jit import kernel

NUM_CANDIDATES = 5
NUM_DEPTHS = 8
NUM_BINS = 20
"""Bins of predicted survival, in the correction and in the reported calibration."""

_MATCHES = 12
_AGREEMENTS = 10
_RELATIONS = 6
_SHAPE = (NUM_CANDIDATES, _MATCHES, _AGREEMENTS, NUM_DEPTHS, _RELATIONS)
NUM_CORRECTIONS = NUM_CANDIDATES * NUM_DEPTHS * NUM_BINS
NUM_CELLS = NUM_CANDIDATES * _MATCHES * _AGREEMENTS * NUM_DEPTHS * _RELATIONS

_FULL = 1024.0
_PRIOR_WEIGHT = 1.5
_FIRST_PRIOR = (0.4, 0.8, 0.9, 0.2, 0.7, 0.85)
"""Prior rate of a draft's first token, by relation to the other candidates."""
_LATER_PRIOR = (0.8, 0.9, 0.95, 0.8, 0.85, 0.9)
_MINORITY_PRIOR = (0.9, 0.7, 0.6, 0.5, 0.25, 0.15)
"""Prior factor for places that disagree, by bin of agreement from 4 on."""

_CORRECTION_FULL = 256.0
_CORRECTION_WEIGHT = 15.0

Counts = npt.NDArray[np.float32]
Rates = npt.NDArray[np.float32]


@kernel
def cell(candidate: int, match: int, agreement: int, depth: int, relation: int) -> int:
    """Return the index of a draft token's cell, from its bins."""
    return (((candidate * _MATCHES + match) * _AGREEMENTS + agreement) * NUM_DEPTHS + depth) * _RELATIONS + relation


@kernel
def match_bin(num_tokens: int) -> int:
    """Bin 0..11 of the number of matching tokens: one bin each at first, then wider bins."""
    if num_tokens <= 6:
        return max(num_tokens - 1, 0)
    for i, most in enumerate((8, 11, 16, 24, 40)):
        if num_tokens <= most:
            return 6 + i
    return 11


@kernel
def agreement_bin(votes: int, voters: int) -> int:
    """Bin 0..9 of agreement: unanimous of one, two, few, many; then smaller and smaller majorities."""
    if votes == voters:
        return 0 if voters == 1 else (1 if voters == 2 else (2 if voters <= 4 else 3))
    share = votes / voters
    for i, least in enumerate((0.75, 0.6, 0.5, 0.35, 0.2)):
        if share >= least:
            return 4 + i
    return 9


@kernel
def depth_bin(k: int) -> int:
    """Bin 0..7 of the k-th token of a draft."""
    if k < 4:
        return k
    return 4 if k < 6 else (5 if k < 8 else (6 if k < 12 else 7))


@kernel
def relation_bin(num_same: int, num_other: int) -> int:
    """Bin 0..5 of the numbers of other candidates that agree and that disagree up to this token."""
    return min(num_same, 2) + 3 * min(num_other, 1)


@kernel
def update_rate(counts: Counts, rates: Rates, where: int, accepted: bool) -> None:
    """Count one accepted or rejected token of a cell."""
    if counts[where, 1] >= _FULL:
        counts[where, 0] *= 0.5
        counts[where, 1] *= 0.5
    counts[where, 0] += 1.0 if accepted else 0.0
    counts[where, 1] += 1.0
    rates[where] = counts[where, 0] / counts[where, 1]


@kernel
def survival_bin(survival: float) -> int:
    """Bin 0..19 of a survival probability."""
    return min(int(survival * NUM_BINS), NUM_BINS - 1)


@kernel
def update_correction(
    sums: Counts, corrections: Rates, candidate: int, depth: int, predicted: float, survived: bool
) -> None:
    """Count one drafted token whose product of rates was `predicted`, and whether it survived."""
    where = (candidate * NUM_DEPTHS + depth) * NUM_BINS + survival_bin(predicted)
    if sums[where, 1] >= _CORRECTION_FULL:
        sums[where, 0] *= 0.5
        sums[where, 1] *= 0.5
    sums[where, 0] += (1.0 if survived else 0.0) - predicted
    sums[where, 1] += 1.0
    corrections[where] = sums[where, 0] / sums[where, 1]


@kernel
def corrected(corrections: Rates, candidate: int, depth: int, predicted: float) -> float:
    """Return the survival probability of a token by both tables."""
    survival = predicted + corrections[(candidate * NUM_DEPTHS + depth) * NUM_BINS + survival_bin(predicted)]
    return float(min(max(survival, 0.0), 1.0))


@kernel
def make_non_increasing(survivals: Rates, length: int) -> None:
    """Average rising runs of survivals[:length]: survival cannot rise along a draft.

    This is isotonic least squares (pool adjacent violators). Capping the values instead would lower estimates that are
    too high and leave those that are too low.
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
    """Return accepted and all tokens of each cell, [NUM_CELLS, 2]: a weak prior for an engine's first forwards."""
    rates = np.empty(_SHAPE)
    rates[:] = np.array(_LATER_PRIOR)
    rates[:, :, :, 0] = np.array(_FIRST_PRIOR)
    rates[:3, :, 4:] *= np.array(_MINORITY_PRIOR)[:, None, None]
    counts = np.stack([_PRIOR_WEIGHT * rates.reshape(-1), np.full(NUM_CELLS, _PRIOR_WEIGHT)], axis=1)
    return counts.astype(np.float32)


def fresh_corrections() -> Counts:
    """Return summed prediction errors and their number, [NUM_CORRECTIONS, 2]: a prior of no error."""
    sums = np.zeros((NUM_CORRECTIONS, 2), dtype=np.float32)
    sums[:, 1] = _CORRECTION_WEIGHT
    return sums


LIVING, ELSEWHERE = 0, 1
"""Origins of the living text and of other prompts' texts."""

_NUM_AGES, _NUM_REWARD_BINS = 8, 4
NUM_ORIGINS = 2 + _NUM_AGES * _NUM_REWARD_BINS

_ORIGIN_FULL = 256.0
_WEIGHT = 10.0
"""Weight of the prior, in rejections. An origin with fewer rejections has little effect."""
_LEAST, _MOST = 0.25, 4.0

Sums = npt.NDArray[np.float32]
Scales = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int32]


def origins(steps: Sequence[int], rewards: Sequence[float], now: int) -> Numbers:
    """Return the origin of each response of a prompt, [R].

    Args:
        steps: [R], steps that sampled the responses.
        rewards: [R], NaN if unknown. Origins distinguish rewards above and below the mean.
        now: the current step.
    """
    known = [reward for reward in rewards if not math.isnan(reward)]
    mean = sum(known) / max(len(known), 1)
    found = [
        2 + _age(now - step) * _NUM_REWARD_BINS + _reward_bin(reward, mean)
        for step, reward in zip(steps, rewards, strict=True)
    ]
    return np.array(found, dtype=np.int32)


def _age(num_steps: int) -> int:
    """Bin of an age: 0 for this step, then 1, 2-3, 4-7, ..; steps of another run are negative, and old."""
    return min(max(num_steps, 0).bit_length(), _NUM_AGES - 1)


def _reward_bin(reward: float, mean: float) -> int:
    """0: unknown, 1: below the mean, 2: at the mean, 3: above."""
    if math.isnan(reward):
        return 0
    if abs(reward - mean) <= 1e-8 + 1e-5 * abs(mean):
        return 2
    return 3 if reward > mean else 1


@kernel
def origin_at(responses: Numbers, position: int) -> int:
    """Return the origin of the response that contains `position` of a segment's tokens.

    `responses` [2 R] holds the ascending starts of a segment's responses, then their origins.
    """
    size = len(responses) >> 1
    number = -1
    for i in range(size):  # without branches, so that the loop is vectorised
        number += responses[i] <= position
    return int(responses[size + number])


@kernel
def scaled(rate: float, scale: float) -> float:
    """Return a cell's rate for an origin with this scale."""
    return float(max(1.0 - (1.0 - rate) * scale, 0.0))


@kernel
def update_origin(sums: Sums, scales: Scales, origin: int, rejection: float, rejected: bool) -> None:
    """Count one chain from `origin`, up to its first rejected token.

    Args:
        sums: [NUM_ORIGINS, 2], observed and expected rejections.
        scales: [NUM_ORIGINS]
        origin: of the chain.
        rejection: sum of the rejection probabilities of these tokens by their cells.
        rejected: whether the last token was rejected; all others were accepted.
    """
    if sums[origin, 1] >= _ORIGIN_FULL:
        sums[origin, 0] *= 0.5
        sums[origin, 1] *= 0.5
    sums[origin, 0] += 1.0 if rejected else 0.0
    sums[origin, 1] += rejection
    scale = (sums[origin, 0] + _WEIGHT) / (sums[origin, 1] + _WEIGHT)
    scales[origin] = min(max(scale, _LEAST), _MOST)
