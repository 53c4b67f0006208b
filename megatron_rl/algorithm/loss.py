"""Policy losses on packed response tokens.

T: response tokens of a micro batch, sequence after sequence (no prompt, no padding); B: its sequences.

A loss takes the tokens of one micro batch and returns a scalar. The *sum* of these scalars over micro batches and
data-parallel ranks is the loss of the mini batch. Each token carries its share of the mean (`coefficients`), whose
denominators are counted over all ranks, so the split into micro batches does not change the gradient.
Metrics are summed in the same way. They have verl's names where the meaning is the same.

* `clipped_surrogate`: PPO's objective (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476,
  section 3.1), times the detached correction weight; optionally dual clip (arXiv 1912.09729, equation 5).
* `cispo`: clipped, detached ratio times log-probability (arXiv 2506.13585, section 3.1).
* `gspo`: length-normalised sequence ratio (arXiv 2507.18071, section 4); its clip bounds are about 1e-4.
* `sft_loss`: negative log-probability.

Invariants: `weights` and ratios that only scale are detached. At logprobs = old_logprobs all three losses have the
gradient -coefficient * weight * advantage. An empty micro batch gives zero loss with a gradient path.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from history.config import load_function
from megatron_rl.algorithm.correction import LOG_RATIO_BOUND, sequence_mean, sequence_sum, spread
from megatron_rl.built_in import LOSSES
from megatron_rl.config import Aggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The tokens of one micro batch; float32 unless stated otherwise."""

    logprobs: Tensor
    """[T], under autograd."""
    entropy: Tensor
    """[T], of the trainer's distribution, in nats. Under autograd if the entropy bonus is on."""
    old_logprobs: Tensor
    """[T]; `logprobs.detach()` if a step has a single mini batch."""
    advantages: Tensor
    """[T]"""
    weights: Tensor
    """[T], detached correction weights: 0 for rejected tokens, 1 without correction."""
    coefficients: Tensor
    """[T], each token's share of the mini batch's mean; see `coefficients`."""
    lengths: Tensor
    """[B] int64 response tokens per sequence; sums to T."""
    num_tokens: int
    """Response tokens of the mini batch over all ranks: denominator of metrics and of the entropy bonus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of a policy loss; see `AlgorithmConfig`."""

    clip_low: float
    clip_high: float
    dual_clip: float
    entropy_bonus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Loss and metrics of one micro batch."""

    loss: Tensor
    """Scalar for the backward pass; needs no further scaling."""
    metrics: dict[str, Tensor]
    """Detached scalars; their sums over micro batches and data-parallel ranks are the mini batch's metrics."""


PolicyLoss = Callable[[LossInputs, LossSettings], LossOutput]


def load_loss(name: str) -> PolicyLoss:
    """The policy loss of a short name or dotted path; raises ValueError if there is none."""
    return cast(PolicyLoss, load_function(LOSSES.path(name), field=LOSSES.key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What the means over a mini batch are taken over, on all ranks together."""

    num_tokens: int
    """Response tokens that count."""
    num_sequences: int
    """Sequences with a token that counts."""
    max_response_tokens: int
    """Most tokens of a response; the constant of `seq_mean_token_sum_norm`."""


def coefficients(lengths: Tensor, counted: Tensor, *, aggregation: Aggregation, denominators: Denominators) -> Tensor:
    """Share of each token in the mini batch's mean, [T] float32; sums to 1 over the mini batch in both true means.

    `lengths` is [B] int64. `counted` is [T] bool: a token that does not count has no share. `token_mean` gives every
    token the same weight and `sequence_mean` every sequence. `seq_mean_token_sum` and its normalised form give every
    token the same weight, whose size does not depend on the lengths (Dr. GRPO, arXiv 2503.20783, section 3.2).
    """
    kept = counted.float()
    match aggregation:
        case "token_mean":
            return kept / max(denominators.num_tokens, 1)
        case "sequence_mean":
            of_sequence = sequence_sum(kept, lengths).clamp(min=1.0) * max(denominators.num_sequences, 1)
            return kept / spread(of_sequence, lengths, len(kept))
        case "seq_mean_token_sum":
            return kept / max(denominators.num_sequences, 1)
        case "seq_mean_token_sum_norm":
            return kept / (max(denominators.num_sequences, 1) * denominators.max_response_tokens)


def clipped_surrogate(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """-w * min(ratio * A, clip(ratio) * A) per token, ratio = exp(logprobs - old_logprobs)."""
    log_ratio = _clamped_log_ratio(inputs)
    surrogate, metrics = _clipped(inputs, settings, ratio=log_ratio.exp())
    return _finish(inputs, settings, token_losses=surrogate, log_ratio=log_ratio, metrics=metrics)


def gspo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """The clipped surrogate with one ratio per sequence: exp of the mean log ratio over its tokens."""
    log_ratio = _clamped_log_ratio(inputs)
    if len(inputs.lengths) == 0:
        sequence_ratio = log_ratio.exp()
    else:
        means = sequence_mean(log_ratio.detach(), inputs.lengths)
        sequence_log_ratio = spread(means, inputs.lengths, len(log_ratio))
        # The value is the sequence's ratio; each token keeps its own gradient (GSPO-token, equation 14).
        sequence_ratio = (inputs.logprobs - inputs.logprobs.detach() + sequence_log_ratio).exp()
    surrogate, metrics = _clipped(inputs, settings, ratio=sequence_ratio)
    return _finish(inputs, settings, token_losses=surrogate, log_ratio=log_ratio, metrics=metrics)


def cispo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """-w * detach(clip(ratio)) * A * logprobs per token: clipped tokens keep a gradient."""
    log_ratio = _clamped_log_ratio(inputs)
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    token_losses = -inputs.weights * clipped * inputs.advantages * inputs.logprobs
    metrics = {"actor/pg_clipfrac": _token_mean(clipped != ratio, inputs.num_tokens)}
    return _finish(inputs, settings, token_losses=token_losses, log_ratio=log_ratio, metrics=metrics)


def sft_loss(logprobs: Tensor, *, coefficients: Tensor) -> LossOutput:
    """Negative log-probability, weighted by each token's share of the mean; both are [T] float32."""
    loss = -(coefficients * logprobs).sum()
    return LossOutput(loss=loss, metrics={"sft/loss": loss.detach()})


def _clamped_log_ratio(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs - inputs.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _clipped(inputs: LossInputs, settings: LossSettings, *, ratio: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    unclipped = -ratio * inputs.advantages
    clipped = -ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * inputs.advantages
    losses = torch.maximum(unclipped, clipped)
    lower = torch.zeros_like(losses, dtype=torch.bool)
    if settings.dual_clip > 0:
        bound = -settings.dual_clip * inputs.advantages
        lower = (inputs.advantages < 0) & (losses > bound)
        losses = torch.where(lower, bound, losses)
    metrics = {
        "actor/pg_clipfrac": _token_mean(clipped > unclipped, inputs.num_tokens),
        "actor/pg_clipfrac_lower": _token_mean(lower, inputs.num_tokens),
    }
    return losses * inputs.weights, metrics


def _finish(
    inputs: LossInputs, settings: LossSettings, *, token_losses: Tensor, log_ratio: Tensor, metrics: dict[str, Tensor]
) -> LossOutput:
    """Sum token losses by their shares, subtract the entropy bonus, add the metrics common to all losses."""
    policy_loss = (inputs.coefficients * token_losses).sum()
    entropy = inputs.entropy.sum() / max(inputs.num_tokens, 1)
    loss = policy_loss - settings.entropy_bonus * entropy if settings.entropy_bonus > 0 else policy_loss
    common = {
        "actor/pg_loss": policy_loss.detach(),
        "actor/entropy": entropy.detach(),
        "actor/ppo_kl": _token_mean(-log_ratio, inputs.num_tokens),
    }
    return LossOutput(loss=loss, metrics=common | metrics)


def _token_mean(values: Tensor, num_tokens: int) -> Tensor:
    return values.detach().float().sum() / max(num_tokens, 1)
