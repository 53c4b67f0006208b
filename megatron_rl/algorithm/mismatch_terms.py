"""Terms of the mismatch metrics: sums and maxima of one micro batch, and metrics of the merged sums.

Three families, each a pair of functions: `_X_terms` (tensors of one micro batch to named scalars) and `_X_metrics`
(merged scalars to metrics). Definitions are verl 0.9.1's. `megatron_rl.algorithm.mismatch` merges the terms.

Invariants: names depend on the configuration, not on the data. Every term is a sum or a maximum over tokens or
sequences, so the split into micro batches cannot change a metric.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithm.columns import LOG_RATIO_BOUND
from megatron_rl.algorithm.correction import (
    NEGLIGIBLE_MEAN,
    PackedLogprobs,
    correction_weights,
    count_of,
    importance_ratio,
    is_sequence_mode,
    k3,
    kept_by_rule,
    kept_tokens,
    rejection_band,
    rejection_statistic,
)
from megatron_rl.algorithm.sequences import sequence_mean, sequence_sum
from megatron_rl.correction_config import CorrectionConfig, RejectionConfig

Scalars = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Named scalars of one micro batch."""

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    """A minimum is the maximum of the negative, under the name with a minus sign."""


def terms_of(logprobs: PackedLogprobs, *, config: CorrectionConfig) -> Terms:
    """All terms of one micro batch; their names depend on `config` only."""
    parts = [_policy_terms(logprobs), _weight_terms(logprobs, config=config), _keep_terms(logprobs, config=config)]
    parts += [_rejection_terms(logprobs, rule=rule) for rule in config.rejections]
    return Terms(
        sums={name: value for part in parts for name, value in part.sums.items()},
        maxima={name: value for part in parts for name, value in part.maxima.items()},
    )


def metrics_of(sums: Scalars, maxima: Scalars, *, config: CorrectionConfig) -> dict[str, float]:
    """Metrics of merged terms, without prefix; needs at least one token."""
    metrics = _policy_metrics(sums, maxima) | _keep_metrics(sums, config=config)
    if config.mode != "none":
        metrics |= _weight_metrics(sums, maxima, config=config)
    for rule in config.rejections:
        metrics |= _rejection_metrics(sums, maxima, rule=rule)
    return metrics


def _policy_terms(logprobs: PackedLogprobs) -> Terms:
    log_ratio = logprobs.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    old_mean = sequence_mean(logprobs.old_logprobs, logprobs.lengths).double()
    rollout_mean = sequence_mean(logprobs.rollout_logprobs, logprobs.lengths).double()
    gap = rollout_mean - old_mean
    product = sequence_sum(logprobs.log_ratio, logprobs.lengths).double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return Terms(
        sums={
            "tokens": count_of(log_ratio),
            "sequences": count_of(gap),
            "k1": -logprobs.log_ratio.double().sum(),  # no exp, so no clamp
            "k3": k3(log_ratio.double()).sum(),
            "ratio": log_ratio.double().exp().sum(),
            "ratio_squared": (2.0 * log_ratio.double()).exp().sum(),
            "product_squared": (2.0 * product).exp().sum(),
            "training_ppl": (-old_mean).exp().sum(),
            "training_log_ppl": -old_mean.sum(),
            "rollout_ppl": (-rollout_mean).exp().sum(),
            "rollout_log_ppl": -rollout_mean.sum(),
            "gap": gap.sum(),
            "abs_gap": gap.abs().sum(),
            "ppl_ratio": gap.exp().sum(),
        },
        maxima={
            "gap": _max(gap),
            "-gap": _max(-gap),
            "log_ratio": _max(log_ratio),
            "abs_log_ratio": _max(log_ratio.abs()),
        },
    )


def _policy_metrics(sums: Scalars, maxima: Scalars) -> dict[str, float]:
    tokens, sequences = sums["tokens"], sums["sequences"]
    per_sequence = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "ppl_ratio")
    return {name: sums[name] / sequences for name in per_sequence} | {
        "kl": sums["k1"] / tokens,
        "k3_kl": sums["k3"] / tokens,
        "log_ppl_diff": sums["gap"] / sequences,
        "log_ppl_abs_diff": sums["abs_gap"] / sequences,
        "log_ppl_diff_max": maxima["gap"],
        "log_ppl_diff_min": -maxima["-gap"],
        "chi2_token": sums["ratio_squared"] / tokens - 1.0,
        "chi2_seq": sums["product_squared"] / sequences - 1.0,
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": math.exp(maxima["log_ratio"]),
        "ratio_eff_sample_size": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]),
        "abs_log_ratio_max": maxima["abs_log_ratio"],
    }


def _weight_terms(logprobs: PackedLogprobs, *, config: CorrectionConfig) -> Terms:
    """Terms of the mode's weights before batch normalisation. Sequence modes have one ratio per sequence."""
    by_sequence = is_sequence_mode(config.mode)
    weights = correction_weights(logprobs, config=config)
    ratio = importance_ratio(logprobs, mode=config.mode)
    low = _weight_floor(config)
    clipped = (ratio > config.cap) | (ratio < low) if config.has_band else ratio > config.cap
    clipped_tokens = logprobs.spread(clipped) if by_sequence else clipped
    means = sequence_mean(weights, logprobs.lengths)
    ratio_means = ratio if by_sequence else sequence_mean(ratio, logprobs.lengths)
    extreme = ratio if by_sequence else weights
    return Terms(
        sums={
            "w": weights.double().sum(),
            "w_squared": weights.double().square().sum(),
            "w_clipped": clipped_tokens.double().sum(),
            "w_ratios": count_of(ratio),
            "w_high": (ratio > config.cap).double().sum(),
            "w_low": (ratio < low).double().sum(),
            "w_seq": means.double().sum(),
            "w_seq_squared": means.double().square().sum(),
            "w_seq_high": (ratio_means > config.cap).double().sum(),
            "w_seq_low": (ratio_means < low).double().sum(),
        },
        maxima={"w": _max(extreme), "-w": _max(-extreme), "w_seq": _max(means), "-w_seq": _max(-means)},
    )


def _weight_metrics(sums: Scalars, maxima: Scalars, *, config: CorrectionConfig) -> dict[str, float]:
    tokens, sequences, ratios = sums["tokens"], sums["sequences"], sums["w_ratios"]
    mean, mean_square = sums["w"] / tokens, sums["w_squared"] / tokens
    seq_mean = sums["w_seq"] / sequences
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(max(mean_square - mean**2, 0.0)),
        "rollout_is_max": maxima["w"],
        "rollout_is_min": -maxima["-w"],
        "rollout_is_eff_sample_size": mean**2 / mean_square if mean_square > 0 else 0.0,
        "rollout_is_ratio_fraction_high": sums["w_high"] / ratios,
        "rollout_is_ratio_fraction_low": sums["w_low"] / ratios,
        "rollout_is_seq_mean": seq_mean,
        "rollout_is_seq_std": _sample_std(sums["w_seq"], sums["w_seq_squared"], sequences),
        "rollout_is_seq_max": maxima["w_seq"],
        "rollout_is_seq_min": -maxima["-w_seq"],
        "rollout_is_seq_max_deviation": max(maxima["w_seq"] - 1.0, 1.0 + maxima["-w_seq"]),
        "rollout_is_seq_fraction_high": sums["w_seq_high"] / sequences,
        "rollout_is_seq_fraction_low": sums["w_seq_low"] / sequences,
        "clip_fraction": sums["w_clipped"] / tokens,
    }
    if config.has_band:
        metrics["rollout_is_oob_ratio"] = metrics["clip_fraction"]
    if config.batch_normalize:
        factor = seq_mean if is_sequence_mode(config.mode) else mean
        metrics["rollout_is_batch_norm_factor"] = factor if factor > NEGLIGIBLE_MEAN else 1.0
    return metrics


def _weight_floor(config: CorrectionConfig) -> float:
    """Ratios below this count as low. Modes without a band use 1 / cap."""
    return config.low if config.has_band else 1.0 / config.cap


def _keep_terms(logprobs: PackedLogprobs, *, config: CorrectionConfig) -> Terms:
    keep = kept_tokens(logprobs, config=config)
    by_rules = kept_tokens(logprobs, config=config.model_copy(update={"veto_ratio": 0.0}))
    vetoed = ~kept_tokens(logprobs, config=config.model_copy(update={"rejections": ()}))
    return Terms(
        sums={
            "kept": keep.double().sum(),
            "rejected": (~by_rules).double().sum(),
            "rejected_seq": _sequences_with(~by_rules, logprobs.lengths),
            "vetoed_seq": _sequences_with(vetoed, logprobs.lengths),
        },
        maxima={},
    )


def _keep_metrics(sums: Scalars, *, config: CorrectionConfig) -> dict[str, float]:
    metrics = {"kept_fraction": sums["kept"] / sums["tokens"]}
    if config.veto_ratio > 0:
        metrics["veto_seq_fraction"] = sums["vetoed_seq"] / sums["sequences"]
    if config.rejections:
        metrics["rollout_rs_masked_fraction"] = sums["rejected"] / sums["tokens"]
        metrics["rollout_rs_seq_masked_fraction"] = sums["rejected_seq"] / sums["sequences"]
    return metrics


def _rejection_terms(logprobs: PackedLogprobs, *, rule: RejectionConfig) -> Terms:
    name, (low, high) = rule.statistic, rejection_band(rule)
    values = rejection_statistic(logprobs, rule=rule)
    by_sequence = name.startswith("seq_")
    per_token = logprobs.spread(values) if by_sequence else values
    per_sequence = values if by_sequence else sequence_mean(values, logprobs.lengths)
    inside = per_token.double().clamp(0.0 if low == -math.inf else low, high)
    dropped = ~kept_by_rule(logprobs, rule=rule)
    sums = {
        "sum": per_token.double().sum(),
        "inside": inside.sum(),
        "inside_squared": inside.square().sum(),
        "values": count_of(values),
        "high": (values > high).double().sum(),
        "low": (values < low).double().sum(),
        "seq": per_sequence.double().sum(),
        "seq_squared": per_sequence.double().square().sum(),
        "seq_high": (per_sequence > high).double().sum(),
        "seq_low": (per_sequence < low).double().sum(),
        "dropped": dropped.double().sum(),
        "dropped_seq": _sequences_with(dropped, logprobs.lengths),
    }
    maxima = {"v": _max(values), "-v": _max(-values), "seq": _max(per_sequence), "-seq": _max(-per_sequence)}
    return Terms(
        sums={f"{name}:{key}": value for key, value in sums.items()},
        maxima={f"{name}:{key}": value for key, value in maxima.items()},
    )


def _rejection_metrics(sums: Scalars, maxima: Scalars, *, rule: RejectionConfig) -> dict[str, float]:
    name, tokens, sequences = rule.statistic, sums["tokens"], sums["sequences"]
    inside_mean = sums[f"{name}:inside"] / tokens
    variance = sums[f"{name}:inside_squared"] / tokens - inside_mean**2
    lowest_seq, highest_seq = -maxima[f"{name}:-seq"], maxima[f"{name}:seq"]
    metrics = {
        "mean": sums[f"{name}:sum"] / tokens,
        "std": math.sqrt(max(variance, 0.0)),
        "max": maxima[f"{name}:v"],
        "min": -maxima[f"{name}:-v"],
        "fraction_high": sums[f"{name}:high"] / sums[f"{name}:values"],
        "fraction_low": sums[f"{name}:low"] / sums[f"{name}:values"],
        "seq_mean": sums[f"{name}:seq"] / sequences,
        "seq_std": _sample_std(sums[f"{name}:seq"], sums[f"{name}:seq_squared"], sequences),
        "seq_max": highest_seq,
        "seq_min": lowest_seq,
        "seq_max_deviation": max(abs(highest_seq), abs(lowest_seq)),
        "seq_fraction_high": sums[f"{name}:seq_high"] / sequences,
        "seq_fraction_low": sums[f"{name}:seq_low"] / sequences,
        "masked_fraction": sums[f"{name}:dropped"] / tokens,
        "seq_masked_fraction": sums[f"{name}:dropped_seq"] / sequences,
    }
    return {f"rollout_rs_{name}_{key}": value for key, value in metrics.items()}


def _sample_std(total: float, total_squared: float, count: float) -> float:
    """Unbiased standard deviation; 0 for a single value."""
    if count < 2:
        return 0.0
    return math.sqrt(max(total_squared - total**2 / count, 0.0) / (count - 1))


def _sequences_with(flags: Tensor, lengths: Tensor) -> Tensor:
    """How many sequences hold a flagged token."""
    return (sequence_sum(flags.float(), lengths) > 0).double().sum()


def _max(values: Tensor) -> Tensor:
    """The largest value; -inf if there is none."""
    if values.numel() == 0:
        return torch.full((), -math.inf, dtype=torch.float64, device=values.device)
    return values.max().double()
