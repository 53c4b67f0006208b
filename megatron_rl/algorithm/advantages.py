"""Advantages of whole responses, on the controller; every token of a response gets the same.

A function of a group takes a `GroupOutcome`, and a function of a batch takes all groups of the step (`BatchOutcome`).
Both return one number for each response. `megatron_rl.algorithm_settings` names the source of each.

Invariants: advantages are finite for finite rewards and follow a permutation of the responses. Those of a group are
zero for rewards that are equal but for rounding (`are_equal`); GRPO, Dr.GRPO and RLOO ignore lengths, and their
advantages sum to zero over the group. Those of a batch have mean 0 over its tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.algorithm_settings import (
    DrGrpo,
    Grpo,
    Opo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Rloo,
)

Rewards = npt.NDArray[np.float64]

WHITENING_EPS = 1e-8
"""Added to the variance of a batch, as in verl."""
_ROUNDING = 1e-9
"""Of a reward, relative to its size above 1: 0.1 + 0.2 is not 0.3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What is known of a group. N: its responses, without aborted and unscored ones."""

    rewards: Rewards
    """[N]"""
    accuracies: Rewards
    """[N], as in evaluations: `acc` if the reward function reports it, else the reward as scored; 0 if scoring
    failed."""
    lengths: npt.NDArray[np.int64]
    """[N], in response tokens."""
    max_response_tokens: int
    """Token limit of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """What is known of a step: its groups, without those that a filter of rewards has dropped."""

    groups: tuple[GroupOutcome, ...]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[sum of N], in response tokens, group after group."""
        return np.concatenate([group.lengths for group in self.groups])


def are_equal(rewards: Rewards) -> bool:
    """Whether rewards, of which there is at least one, differ by no more than rounding."""
    return bool(np.ptp(rewards) <= _ROUNDING * max(1.0, float(np.abs(rewards).max())))


def grpo(outcome: GroupOutcome, settings: Grpo) -> Rewards:
    """(r - mean) / (std + eps) with the unbiased std, [N]; zero for a single response."""
    if are_equal(outcome.rewards):  # so is a single one; without eps, the quotient would be 0 / 0
        return np.zeros_like(outcome.rewards)
    return np.asarray(_centred(outcome.rewards) / (outcome.rewards.std(ddof=1) + settings.std_eps))


def dr_grpo(outcome: GroupOutcome, settings: DrGrpo) -> Rewards:
    """R - mean, [N]: dividing by the std would favour very easy and very hard prompts."""
    del settings
    return _centred(outcome.rewards)


def rloo(outcome: GroupOutcome, settings: Rloo) -> Rewards:
    """R minus the mean of the other responses, [N]; zero for a single response."""
    del settings
    num_responses = len(outcome.rewards)
    if num_responses < 2:
        return np.zeros_like(outcome.rewards)
    return np.asarray(_centred(outcome.rewards) * (num_responses / (num_responses - 1)))


def opo(outcome: GroupOutcome, settings: Opo) -> Rewards:
    """R minus the mean of rewards weighted by lengths, [N]: the baseline of least variance of the gradient."""
    del settings
    if are_equal(outcome.rewards):
        return np.zeros_like(outcome.rewards)
    baseline = (outcome.lengths * outcome.rewards).sum() / outcome.lengths.sum()
    return np.asarray(outcome.rewards - baseline)


def reinforce_plus_plus(outcome: BatchOutcome, settings: ReinforcePlusPlus) -> Rewards:
    """Rewards standardised over the tokens of the step, [sum of N]."""
    del settings
    return _whitened(np.concatenate([group.rewards for group in outcome.groups]), outcome.lengths)


def reinforce_plus_plus_baseline(outcome: BatchOutcome, settings: ReinforcePlusPlusBaseline) -> Rewards:
    """Rewards minus the mean of their group, standardised over the tokens of the step, [sum of N].

    A group of a single response has no baseline.
    """
    del settings
    centred = [_centred(group.rewards) if len(group.rewards) > 1 else group.rewards for group in outcome.groups]
    return _whitened(np.concatenate(centred), outcome.lengths)


def checked(values: object, rewards: Rewards, *, key: str) -> Rewards:
    """What a function of responses returned; raises ValueError unless it is one finite number for each reward."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.shape != rewards.shape:
        raise ValueError(
            f"{key} returned shape {numbers.shape} for {len(rewards)} responses; it must return one number per response"
        )
    if not np.isfinite(numbers).all():
        raise ValueError(f"{key} returned {numbers.tolist()} for rewards {rewards.tolist()}")
    return numbers


def _centred(values: Rewards) -> Rewards:
    """Values minus their mean; exactly zero for equal values, whose mean may differ by rounding."""
    return np.zeros_like(values) if are_equal(values) else np.asarray(values - values.mean())


def _whitened(values: Rewards, lengths: npt.NDArray[np.int64]) -> Rewards:
    """Values of responses, standardised over their tokens with the unbiased variance."""
    num_tokens = int(lengths.sum())
    if are_equal(values):
        return np.zeros_like(values)
    mean = (lengths * values).sum() / num_tokens
    variance = (lengths * (values - mean) ** 2).sum() / max(num_tokens - 1, 1)
    return np.asarray((values - mean) / np.sqrt(variance + WHITENING_EPS))
