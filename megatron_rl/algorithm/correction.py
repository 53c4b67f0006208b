"""Corrects for the difference between the quantised sampler and the trainer: importance weights, hard trust regions.

T: response tokens of a micro batch, packed sequence after sequence without padding; B: its sequences.
lr = old_logprobs - rollout_logprobs, clamped to +-20 before exp; r = exp(lr).

Weights by mode (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025):

| mode              | weight of a token                                              |
|-------------------|----------------------------------------------------------------|
| none              | 1                                                              |
| tis_token         | min(r, cap)                                                    |
| tis_sequence      | min(exp(sum of lr over the sequence), cap)                     |
| icepop            | r inside [low, cap], else 0                                    |
| icepop_sequence   | exp(sum of lr) inside [low, cap], else 0                       |
| mis_product       | 1 where exp(sum of lr) lies in [low, cap], else 0              |
| mis_geometric     | 1 where exp(mean of lr) lies in [low, cap], else 0             |

In every mode, `batch_normalize` divides by the mean weight of the step, and the veto and `rejections` set weights to 0.
Rejected tokens are those that the veto, `rejections` or a mask of `mis_*` sets to 0. They leave the denominators of the
loss, as in verl, unless `rejected_in_denominators` is on.
Batch normalisation needs the whole step, so it has three parts: local sums, a reduction over ranks, the division.

Invariants: weights are detached, finite and not negative. The split into micro batches changes results only through
the sums that the caller reduces. Definitions and names follow verl 0.9.1 (tests/data).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithm.columns import LOG_RATIO_BOUND
from megatron_rl.algorithm.sequences import segment, sequence_mean, sequence_sum, spread
from megatron_rl.correction_config import CorrectionConfig, RejectionConfig

NEGLIGIBLE_MEAN = 1e-8
"""Weights with a mean below this are not normalised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLogprobs:
    """Log-probabilities of the responses of one micro batch, which may be empty."""

    old_logprobs: Tensor
    """[T] float32, of the trainer, detached."""
    rollout_logprobs: Tensor
    """[T] float32, of the sampler."""
    lengths: Tensor
    """[B] int64 response tokens per sequence, each positive; sums to T."""

    @property
    def log_ratio(self) -> Tensor:
        """lr, [T], not clamped."""
        return self.old_logprobs - self.rollout_logprobs

    def spread(self, of_sequences: Tensor) -> Tensor:
        """A value of each sequence, [B], for each of its tokens, [T]."""
        return spread(of_sequences, self.lengths, len(self.old_logprobs))


def correction_weights(logprobs: PackedLogprobs, *, config: CorrectionConfig) -> Tensor:
    """Weights of the configured mode, [T] float32, before batch normalisation and rejections."""
    ratio = importance_ratio(logprobs, mode=config.mode)
    inside = (ratio >= config.low) & (ratio <= config.cap)
    match config.mode:
        case "tis_token" | "tis_sequence":
            weights = ratio.clamp(max=config.cap)
        case "icepop" | "icepop_sequence":
            weights = torch.where(inside, ratio, torch.zeros_like(ratio))
        case "mis_product" | "mis_geometric":
            weights = inside.float()
        case "none":
            weights = torch.ones_like(ratio)
    return logprobs.spread(weights) if is_sequence_mode(config.mode) else weights


def importance_ratio(logprobs: PackedLogprobs, *, mode: str) -> Tensor:
    """Probability ratio of a mode before capping: [T] for token modes, [B] for sequence modes, float32."""
    log_ratio = logprobs.log_ratio
    if mode in ("tis_sequence", "icepop_sequence", "mis_product"):
        log_ratio = sequence_sum(log_ratio, logprobs.lengths)
    elif mode == "mis_geometric":
        log_ratio = sequence_mean(log_ratio, logprobs.lengths)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def is_sequence_mode(mode: str) -> bool:
    """Whether all tokens of a sequence share one weight."""
    return mode in ("tis_sequence", "icepop_sequence", "mis_product", "mis_geometric")


def normalization_sums(weights: Tensor, lengths: Tensor, *, config: CorrectionConfig) -> Tensor:
    """Local sum and count of weights, [2] float64, to be summed over micro batches and data-parallel ranks.

    Sequence modes count each sequence once, token modes each token.
    """
    values = sequence_mean(weights, lengths) if is_sequence_mode(config.mode) else weights
    return torch.stack([values.double().sum(), count_of(values)])


def count_of(values: Tensor) -> Tensor:
    """Number of values, as a float64 scalar on their device; filled there, because a copy would wait."""
    return torch.full((), float(values.numel()), dtype=torch.float64, device=values.device)


def normalize(weights: Tensor, sums: Tensor) -> Tensor:
    """Weights divided by the mean from reduced `sums`; unchanged if the mean is negligible."""
    mean = sums[0] / sums[1].clamp(min=1.0)
    return weights / torch.where(mean > NEGLIGIBLE_MEAN, mean, 1.0).to(weights.dtype)


def final_weights(logprobs: PackedLogprobs, *, config: CorrectionConfig, sums: Tensor | None = None) -> Tensor:
    """Weights of the loss, [T] float32: the mode's weights, then batch normalisation, then veto and rejections.

    `sums` are the step's reduced `normalization_sums`. Raises ValueError when `batch_normalize` is on without them.
    """
    weights = correction_weights(logprobs, config=config)
    if config.batch_normalize:
        if sums is None:
            raise ValueError("correction.batch_normalize is on, but the step's normalization_sums were not given")
        weights = normalize(weights, sums)
    return torch.where(kept_tokens(logprobs, config=config), weights, torch.zeros_like(weights))


def kept_tokens(logprobs: PackedLogprobs, *, config: CorrectionConfig) -> Tensor:
    """Which tokens pass the veto and every rejection, [T] bool."""
    keep = torch.ones_like(logprobs.old_logprobs, dtype=torch.bool)
    if config.veto_ratio > 0:
        lowest = segment(logprobs.log_ratio, logprobs.lengths, "min")
        keep &= logprobs.spread(lowest >= math.log(config.veto_ratio))
    for rule in config.rejections:
        keep &= kept_by_rule(logprobs, rule=rule)
    return keep


def counted_tokens(logprobs: PackedLogprobs, *, config: CorrectionConfig) -> Tensor:
    """Which tokens the loss's denominators count, [T] bool."""
    if not config.counts_kept_tokens:
        return torch.ones_like(logprobs.old_logprobs, dtype=torch.bool)
    keep = kept_tokens(logprobs, config=config)
    return keep & (correction_weights(logprobs, config=config) > 0) if config.is_mask else keep


def kept_by_rule(logprobs: PackedLogprobs, *, rule: RejectionConfig) -> Tensor:
    """Which tokens one rejection keeps, [T] bool; sequence statistics keep or drop whole sequences."""
    statistic = rejection_statistic(logprobs, rule=rule)
    low, high = rejection_band(rule)
    keep = (statistic >= low) & (statistic <= high)
    return logprobs.spread(keep) if rule.statistic.startswith("seq_") else keep


def rejection_statistic(logprobs: PackedLogprobs, *, rule: RejectionConfig) -> Tensor:
    """The divergence that a rejection measures: [T] for token statistics, [B] for sequence statistics, float32."""
    reduction, _, estimator = rule.statistic.rpartition("_")
    log_ratio = logprobs.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    values = {"k1": -logprobs.log_ratio, "k2": 0.5 * log_ratio.square(), "k3": k3(log_ratio)}[estimator]
    if reduction == "token":
        return values
    return segment(values, logprobs.lengths, reduction.removeprefix("seq_"))


def rejection_band(rule: RejectionConfig) -> tuple[float, float]:
    """Smallest and largest kept value of a rejection's statistic."""
    if not rule.statistic.endswith("k1"):
        return -math.inf, rule.high
    return math.log(rule.low or 1.0 / rule.high), math.log(rule.high)


def k3(log_ratio: Tensor) -> Tensor:
    """exp(lr) - 1 - lr per token: the estimator of KL(sampler || trainer) that is never negative."""
    return log_ratio.exp() - 1.0 - log_ratio
