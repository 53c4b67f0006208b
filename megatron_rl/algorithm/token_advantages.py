"""Advantages of tokens, on the trainer after the old, reference and value forwards.

A function takes the tokens of one micro batch (`TokenOutcome`) and returns `TokenAdvantages`. Whitening needs the whole
step, so it has three parts, as batch normalisation of the correction: local sums, a reduction over ranks, the division.

T: response tokens of a micro batch, sequence after sequence; B: its sequences. Recurrences that run backward over each
sequence are computed by doubling, in about log2(T) products of whole columns and in float64, so nothing waits for the
device. Tokens that the policy has not sampled (`loss_mask`) hand on what comes after them.

Invariants: results are detached. The split into micro batches changes them only through the sums that the caller
reduces.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.algorithm.advantages import WHITENING_EPS
from megatron_rl.algorithm.columns import Columns
from megatron_rl.algorithm_settings import DiscountedReturns, Gae


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutcome:
    """The tokens of one micro batch, which may be empty; float32 and detached."""

    rewards: Tensor
    """[T]: the shaped reward of the response at its last sampled token, minus the divergence if it is in the reward."""
    old_logprobs: Tensor
    """[T]"""
    rollout_logprobs: Tensor
    """[T]"""
    loss_mask: Tensor
    """[T] bool, which tokens the policy has sampled."""
    lengths: Tensor
    """[B] int64 response tokens per sequence."""
    further: Columns = field(default_factory=Columns)
    """The columns that functions declare."""

    @property
    def ref_logprobs(self) -> Tensor:
        """[T], of the reference policy; raises RuntimeError if no function declares it."""
        return self.further["ref"]

    @property
    def values(self) -> Tensor:
        """[T], of the critic; raises RuntimeError if no function declares it."""
        return self.further["values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """What a function of tokens returns for one micro batch."""

    advantages: Tensor
    """[T]"""
    returns: Tensor
    """[T], what a critic learns to predict."""
    whiten: bool
    """Standardise the advantages over all tokens of the step."""


def discounted_returns(outcome: TokenOutcome, settings: DiscountedReturns) -> TokenAdvantages:
    """Rewards from a token to the end of its sequence, each discounted by its distance."""
    returns = _backward_sums(outcome.rewards, outcome, settings.gamma)
    return TokenAdvantages(advantages=returns, returns=returns, whiten=settings.whiten)


def gae(outcome: TokenOutcome, settings: Gae) -> TokenAdvantages:
    """Discounted sums of the errors of the critic's predictions."""
    values = outcome.values
    is_last = _is_last(outcome.lengths, len(values))
    following = _backward_sums(values, outcome, 0.0).roll(-1).masked_fill(is_last, 0.0)
    errors = outcome.rewards + settings.gamma * following - values
    advantages = _backward_sums(errors, outcome, settings.gamma * settings.lam)
    return TokenAdvantages(advantages=advantages, returns=advantages + values, whiten=settings.whiten)


def terminal_rewards(rewards: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """The reward of each sequence, [B], at its last token, [T]; 0 elsewhere."""
    ends = lengths.cumsum(0) - 1
    return torch.zeros(num_tokens, dtype=rewards.dtype, device=rewards.device).index_add(0, ends, rewards)


def whitening_sums(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Local count, sum and sum of squares, [3] float64, to be summed over micro batches and data-parallel ranks."""
    values = advantages.double() * loss_mask
    return torch.stack([loss_mask.double().sum(), values.sum(), values.square().sum()])


def whitened(advantages: Tensor, sums: Tensor) -> Tensor:
    """Advantages standardised by reduced `sums`, with the unbiased variance."""
    count, total, squares = sums
    mean = total / count.clamp(min=1.0)
    variance = (squares - count * mean.square()).clamp(min=0.0) / (count - 1.0).clamp(min=1.0)
    standardised: Tensor = (advantages.double() - mean) * (variance + WHITENING_EPS).rsqrt()
    return standardised.to(advantages.dtype)


def _backward_sums(terms: Tensor, outcome: TokenOutcome, factor: float) -> Tensor:
    """X with x[t] = terms[t] + factor * x[t + 1] inside each sequence; a token that was not sampled has x[t + 1]."""
    sums = torch.where(outcome.loss_mask, terms.double(), 0.0)
    factors = torch.full_like(sums, factor).masked_fill(~outcome.loss_mask, 1.0)
    factors = factors.masked_fill(_is_last(outcome.lengths, len(terms)), 0.0)
    reach = 1
    while reach < len(terms):  # sums and factors cover `reach` tokens from each one on
        sums = sums + factors * _later(sums, reach)
        factors = factors * _later(factors, reach)
        reach *= 2
    return sums.to(terms.dtype)


def _later(values: Tensor, distance: int) -> Tensor:
    """The value so many tokens later; 0 behind the end."""
    later: Tensor = torch.cat([values[distance:], values.new_zeros(distance)])
    return later


def _is_last(lengths: Tensor, num_tokens: int) -> Tensor:
    """[T] bool, whether a token ends its sequence."""
    ends = lengths.cumsum(0) - 1
    return torch.zeros(num_tokens, dtype=torch.bool, device=lengths.device).index_fill(0, ends, True)
