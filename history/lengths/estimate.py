"""Estimates a prompt's response length, and the remaining tokens of a running response, from past lengths.

Older visits have less weight because the policy changes. Response lengths have a heavy tail: the longer a response, the
more tokens are expected to follow. Beyond the longest observation, and for unseen prompts, the expected remainder grows
in proportion to the emitted tokens, as for a Pareto tail.

Invariants: all figures are finite and not negative; quantiles never fall. Without observations all figures are those of
the prior.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OLDER = 0.5
"""Weight of a visit, relative to the visit after it."""
_TAIL = 0.5
"""Expected remainder over emitted tokens in the tail: mean excess of a Pareto distribution of shape 3."""
PRIOR_WEIGHT = 0.5
"""Weight of the prior, in responses of the last visit."""

PRIOR_MEAN = 1024.0
"""Tokens; the default if the caller passes no mean over other prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEstimate:
    """Estimated length of a prompt's next response. Unit: tokens."""

    num_observations: int
    mean: float
    p50: float
    p90: float
    max: float
    """Longest observation; 0 without observations."""
    prior_mean: float
    lengths: tuple[int, ...]
    """All observations, ascending."""
    weights: tuple[float, ...]
    """Weight of each observation; 1 for the last visit."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, steps: Sequence[int] = (), prior_mean: float = PRIOR_MEAN
    ) -> "LengthEstimate":
        """Estimate from past responses of one prompt.

        Args:
            lengths: tokens of each, at least 1.
            steps: the step of each; empty: all belong to one visit.
            prior_mean: expected length for an unseen prompt, such as the mean over other prompts.

        Raises:
            ValueError: a length is below 1, the prior is not positive, or steps and lengths differ in number.
        """
        observed = np.asarray(lengths, dtype=np.int64)
        if (observed < 1).any() or not 0 < prior_mean < np.inf:
            raise ValueError(f"lengths {list(lengths)} and prior mean {prior_mean} must be positive")
        if steps and len(steps) != len(observed):
            raise ValueError(f"{len(observed)} lengths have {len(steps)} steps; pass one step for each length")
        weights = visit_weights(steps or [0] * len(observed))
        order = np.argsort(observed, kind="stable")
        observed, weights = observed[order], weights[order]
        total = weights.sum() + PRIOR_WEIGHT
        return cls(
            num_observations=len(observed),
            mean=float((observed @ weights + PRIOR_WEIGHT * prior_mean) / total),
            p50=_quantile(observed, weights, 0.5, prior_mean),
            p90=_quantile(observed, weights, 0.9, prior_mean),
            max=float(observed.max(initial=0)),
            prior_mean=float(prior_mean),
            lengths=tuple(observed.tolist()),
            weights=tuple(weights.tolist()),
        )

    def remaining(self, emitted: int) -> float:
        """Expected remaining tokens of a running response that has emitted `emitted` tokens."""
        return float(self.remaining_after(np.array([emitted]))[0])

    def remaining_after(self, emitted: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Expected remaining tokens of many responses, [n] -> [n].

        The compiled drafter interpolates in a table of these values.
        """
        return remaining_after(emitted, np.asarray(self.lengths), np.asarray(self.weights), self.prior_mean)


def visit_weights(steps: Sequence[int]) -> npt.NDArray[np.float64]:
    """Weight of each response by the step that sampled it, 1 for the last visit."""
    if len(set(steps)) <= 1:
        return np.ones(len(steps))
    visits, visit = np.unique(np.asarray(steps), return_inverse=True)
    return np.asarray(np.power(OLDER, len(visits) - 1 - visit, dtype=np.float64))


def remaining_after(
    emitted: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.integer],
    weights: npt.NDArray[np.float64],
    prior_mean: float,
) -> npt.NDArray[np.float64]:
    """Expected remaining tokens after `emitted` tokens [n], from observed lengths and their weights [m].

    The drafter calls it for every new prompt, which has no use for the other figures of an estimate.
    """
    excess = np.maximum(lengths[None, :] - emitted[:, None], 0)
    counted = weights[None, :] * (excess > 0)
    tail = np.maximum(prior_mean - emitted, 0) + _TAIL * emitted
    return np.asarray(((excess * counted).sum(axis=1) + PRIOR_WEIGHT * tail) / (counted.sum(axis=1) + PRIOR_WEIGHT))


def _quantile(lengths: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], share: float, prior: float) -> float:
    """Weighted quantile of the lengths; that of an exponential prior without observations."""
    if not len(lengths):
        return float(-prior * np.log(1 - share))
    reached = np.cumsum(weights) >= share * weights.sum() - 1e-9
    return float(lengths[np.argmax(reached)])
