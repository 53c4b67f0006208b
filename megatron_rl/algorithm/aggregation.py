"""Aggregations: each token's share of the mean over a mini batch.

The *sum* over micro batches and data-parallel ranks is the loss of the mini batch. Denominators are counted over all
ranks, so the split into micro batches does not change the gradient. A token that does not count has no share.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron_rl.algorithm.sequences import sequence_sum, spread
from megatron_rl.algorithm_settings import SeqMeanTokenSum, SeqMeanTokenSumNorm, SequenceMean, TokenMean


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What the means over a mini batch are taken over, on all ranks together."""

    num_tokens: int
    """Response tokens that count."""
    num_sequences: int
    """Sequences with a token that counts."""
    max_response_tokens: int
    """Most tokens of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanInputs:
    """What the shares of one micro batch depend on."""

    lengths: Tensor
    """[B] int64 response tokens per sequence."""
    counted: Tensor
    """[T] bool, which tokens count."""
    denominators: Denominators


def token_mean(inputs: MeanInputs, settings: TokenMean) -> Tensor:
    """Every token has the same share, [T] float32; shares sum to 1 over the mini batch."""
    del settings
    return inputs.counted.float() / max(inputs.denominators.num_tokens, 1)


def sequence_mean(inputs: MeanInputs, settings: SequenceMean) -> Tensor:
    """Every sequence has the same share, [T] float32; shares sum to 1 over the mini batch."""
    del settings
    kept = inputs.counted.float()
    of_sequence = sequence_sum(kept, inputs.lengths).clamp(min=1.0) * max(inputs.denominators.num_sequences, 1)
    return kept / spread(of_sequence, inputs.lengths, len(kept))


def seq_mean_token_sum(inputs: MeanInputs, settings: SeqMeanTokenSum) -> Tensor:
    """Every token has the same share, [T] float32, whose size does not depend on the lengths."""
    del settings
    return inputs.counted.float() / max(inputs.denominators.num_sequences, 1)


def seq_mean_token_sum_norm(inputs: MeanInputs, settings: SeqMeanTokenSumNorm) -> Tensor:
    """Every token has the same share, [T] float32, divided by a constant."""
    constant = settings.constant or inputs.denominators.max_response_tokens
    return inputs.counted.float() / (max(inputs.denominators.num_sequences, 1) * constant)
