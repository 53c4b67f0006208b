"""The columns of tokens that a loss reads, and the losses of tokens that it returns.

T: response tokens of a micro batch, sequence after sequence (no prompt, no padding); B: its sequences.

`ref` and `values` cost forwards of further models, so they exist only if a function declares them
(`megatron_rl.algorithm.plug_in.needs`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.algorithm.sequences import sequence_sum, spread
from megatron_rl.stages import Column

LOG_RATIO_BOUND = 20.0
"""Log ratios, and their sums over a sequence, are clamped to +-20 before exp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of some tokens by name."""

    tensors: Mapping[Column, Tensor] = field(default_factory=dict)
    """[T] float32 each."""

    def __getitem__(self, name: Column) -> Tensor:
        """The column; raises RuntimeError if no function declares that it needs it."""
        if name not in self.tensors:
            raise RuntimeError(
                f"a function of the algorithm reads the column `{name}`, but none declares it (it has "
                f"{sorted(self.tensors) or 'no further column'}); write `@needs({name!r})` above the function"
            )
        return self.tensors[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The tokens of one micro batch; float32 unless stated otherwise."""

    logprobs: Tensor
    """[T], under autograd."""
    entropy: Tensor
    """[T], of the trainer's distribution, in nats. Under autograd if the entropy bonus is on."""
    old_logprobs: Tensor
    """[T]; `logprobs.detach()` if a step has a single mini batch."""
    rollout_logprobs: Tensor
    """[T], of the sampler."""
    advantages: Tensor
    """[T]"""
    coefficients: Tensor
    """[T], each token's share of the mini batch's mean; see `megatron_rl.algorithm.aggregation`. 0 for a token that
    does not count."""
    loss_mask: Tensor
    """[T] bool, which tokens the policy has sampled. Others have no share of the loss, of a mean or of a metric."""
    staleness: Tensor
    """[B] int64, policy versions."""
    lengths: Tensor
    """[B] int64 response tokens per sequence; sums to T."""
    num_tokens: int
    """Sampled tokens of the mini batch over all ranks: denominator of metrics and of the entropy bonus."""
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

    @property
    def log_ratio(self) -> Tensor:
        """Logprobs - old_logprobs, [T], clamped."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def spread(self, of_sequences: Tensor) -> Tensor:
        """A value of each sequence, [B], for each of its tokens, [T]."""
        return spread(of_sequences, self.lengths, len(self.logprobs))

    def sampled(self, values: Tensor) -> Tensor:
        """Values, [T], with 0 at tokens that the policy has not sampled, which get no gradient either."""
        return torch.where(self.loss_mask, values, 0.0)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over the sampled tokens of each sequence: [T] to [B]; 0 for a sequence without any."""
        counts = sequence_sum(self.loss_mask.to(values.dtype), self.lengths)
        return sequence_sum(self.sampled(values), self.lengths) / counts.clamp(min=1.0)

    def mean(self, values: Tensor) -> Tensor:
        """The micro batch's share of a mean over the tokens of the mini batch; a detached scalar, for metrics."""
        return self.sampled(values.detach().float()).sum() / max(self.num_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """What a loss returns for one micro batch."""

    losses: Tensor
    """[T], without the weights of the correction and without shares of the mean: both are multiplied later."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached scalars; their sums over micro batches and data-parallel ranks are the mini batch's metrics."""
