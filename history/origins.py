"""How old a past response is and what it was worth, as a feature of acceptance.

Responses that a policy gave long ago, or that it was taught to avoid, are repeated less. How much less is not a
rule but learned: of each *origin* (age and worth), how often its tokens were rejected over how often their cells
(`history.acceptance`) said they would be. That quotient scales the chance of rejection of a token that is drafted
from there. Two features in a table of their own, so that cells do not get rarer.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from history.kernel import kernel

LIVING, ELSEWHERE = 0, 1
"""Origins of this step's own text, and of other prompts' texts."""

_NUM_AGES, _NUM_WORTHS = 8, 4
NUM_ORIGINS = 2 + _NUM_AGES * _NUM_WORTHS

_FULL = 256.0
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
def score_origin(sums: Sums, scales: Scales, origin: int, rejection: float, rejected: bool) -> None:
    """One more chain from `origin`, up to what was rejected of it.

    Args:
        sums: [NUM_ORIGINS, 2], rejections and how many were expected.
        scales: [NUM_ORIGINS]
        origin: of the chain.
        rejection: sum of the probabilities of rejection that the cells of these tokens said.
        rejected: whether the last of them was; the others were not.
    """
    if sums[origin, 1] >= _FULL:
        sums[origin, 0] *= 0.5
        sums[origin, 1] *= 0.5
    sums[origin, 0] += 1.0 if rejected else 0.0
    sums[origin, 1] += rejection
    scale = (sums[origin, 0] + _WEIGHT) / (sums[origin, 1] + _WEIGHT)
    scales[origin] = min(max(scale, _LEAST), _MOST)
