"""Filters: which groups are trained on, on the controller.

A filter of rewards takes a `GroupOutcome` with the rewards of the reward function and runs before the advantage, so
that dropped groups do not count in a batch's mean. A filter of signals takes a `GroupSignal` and runs after it. Both
return whether the group is kept. `megatron_rl.algorithm_settings` names the source of each.
"""

from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.advantages import GroupOutcome, Rewards, are_equal
from megatron_rl.algorithm_settings import Accuracy, KeepAll, ZeroVariance

_ROUNDING = 1e-6
"""Of an accuracy: a weighted sum of rewards may be 1.0000000000000002."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSignal:
    """What a group teaches."""

    outcome: GroupOutcome
    """With shaped rewards."""
    advantages: Rewards | None
    """[N]; None where the trainer computes them."""

    @property
    def is_zero(self) -> bool:
        """Whether all advantages are zero or, where they are not known here, all rewards are equal."""
        if self.advantages is None:
            return are_equal(self.outcome.rewards)
        return not self.advantages.any()


def zero_variance(signal: GroupSignal, settings: ZeroVariance) -> bool:
    """Whether the group has a signal."""
    del settings
    return not signal.is_zero


def accuracy(outcome: GroupOutcome, settings: Accuracy) -> bool:
    """Whether the mean accuracy lies strictly between the bounds.

    Raises ValueError for an accuracy outside 0 to 1: a reward of another scale has no place between the bounds.
    """
    inside = outcome.accuracies.clip(0, 1)
    outside = outcome.accuracies[np.abs(outcome.accuracies - inside) > _ROUNDING]
    if outside.size:
        raise ValueError(
            f"`algorithm.filter` = accuracy: a response has the accuracy {float(outside[0])}, which is not between 0 "
            "and 1; let the reward function return such an `acc` beside `score`, or set filter to zero_variance"
        )
    return settings.low + _ROUNDING < float(inside.mean()) < settings.high - _ROUNDING


def keep_all(outcome: GroupOutcome, settings: KeepAll) -> bool:
    """True."""
    del outcome, settings
    return True
