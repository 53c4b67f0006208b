"""How long a prompt's responses are, and how much of one is still to come, from those it had before.

Older visits count less: a policy changes. The tail of lengths is heavy, so the longer a response has
become, the longer it is expected to go on: beyond the longest seen, and for a prompt never seen, the
expected rest grows in proportion to what exists, as a Pareto tail's does.

Invariants: every figure is finite and not negative; quantiles do not fall; with no observation all figures are those
of the prior.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OLDER = 0.5
"""What a visit counts, relative to the one after it."""
_TAIL = 0.5
"""Expected rest over what exists, in the tail: mean excess of a Pareto distribution of shape 3."""
PRIOR_WEIGHT = 0.5
"""Of the prior, in responses of the last visit."""

PRIOR_MEAN = 1024.0
"""Tokens, where nobody knows better; pass the mean over other prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEstimate:
    """What to expect of a prompt's next response. Unit: tokens."""

    num_observations: int
    mean: float
    p50: float
    p90: float
    max: float
    """Longest seen; 0 for none."""
    prior_mean: float
    lengths: tuple[int, ...]
    """All that were seen, ascending."""
    weights: tuple[float, ...]
    """What each of them counts; those of the last visit count 1."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, steps: Sequence[int] = (), prior_mean: float = PRIOR_MEAN
    ) -> "LengthEstimate":
        """Estimate from responses of one prompt.

        Args:
            lengths: tokens of each, at least 1.
            steps: the step of each; left out, they are all of one visit.
            prior_mean: what to expect of a prompt that was never seen, such as the mean over others.

        Raises:
            ValueError: a length below 1, a prior that is not positive, or as many steps as there are not lengths.
        """
        found = np.asarray(lengths, dtype=np.int64)
        if (found < 1).any() or not 0 < prior_mean < np.inf:
            raise ValueError(f"lengths {list(lengths)} and prior mean {prior_mean} must be positive")
        if steps and len(steps) != len(found):
            raise ValueError(f"{len(found)} lengths have {len(steps)} steps; each needs one")
        visits, visit = np.unique(np.asarray(steps or [0] * len(found)), return_inverse=True)
        weights = np.power(OLDER, len(visits) - 1 - visit, dtype=np.float64)
        order = np.argsort(found, kind="stable")
        found, weights = found[order], weights[order]
        total = weights.sum() + PRIOR_WEIGHT
        return cls(
            num_observations=len(found),
            mean=float((found @ weights + PRIOR_WEIGHT * prior_mean) / total),
            p50=_quantile(found, weights, 0.5, prior_mean),
            p90=_quantile(found, weights, 0.9, prior_mean),
            max=float(found.max(initial=0)),
            prior_mean=float(prior_mean),
            lengths=tuple(found.tolist()),
            weights=tuple(weights.tolist()),
        )

    def remaining(self, emitted: int) -> float:
        """Expected number of tokens still to come of a response that has `emitted` and has not ended."""
        return float(self.remaining_after(np.array([emitted]))[0])

    def remaining_after(self, emitted: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The same for many, [n] -> [n].

        A table of it over a grid is what a compiled drafter interpolates in.
        """
        excess = np.maximum(np.asarray(self.lengths)[None, :] - emitted[:, None], 0)
        counted = np.asarray(self.weights)[None, :] * (excess > 0)
        tail = np.maximum(self.prior_mean - emitted, 0) + _TAIL * emitted
        return np.asarray(((excess * counted).sum(axis=1) + PRIOR_WEIGHT * tail) / (counted.sum(axis=1) + PRIOR_WEIGHT))


def _quantile(lengths: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], share: float, prior: float) -> float:
    """The least length that `share` of the weight does not exceed; of an exponential prior where nothing was seen."""
    if not len(lengths):
        return float(-prior * np.log(1 - share))
    reached = np.cumsum(weights) >= share * weights.sum() - 1e-9
    return float(lengths[np.argmax(reached)])
