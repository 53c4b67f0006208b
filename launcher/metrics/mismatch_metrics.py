"""Rows of the registry for the gap between sampler and trainer, `rollout_corr/...`.

A row is: name, unit, reduction, meaning, healthy value. lr is `old_logprobs - rollout_logprobs` of a token.
Definitions: `megatron_rl.algorithm.mismatch_terms`.
"""

from launcher.metrics.run_metrics import Row

_TOKENS, _SEQUENCES = "mean over tokens", "mean over sequences"

_GAP: tuple[Row, ...] = (
    ("kl", "nats per token", _TOKENS, "-lr.", "near 0"),
    ("k3_kl", "nats per token", _TOKENS, "exp(lr) - 1 - lr.", "below 5e-3"),
    ("training_ppl", "perplexity", _SEQUENCES, "Perplexity of the trainer.", ""),
    ("rollout_ppl", "perplexity", _SEQUENCES, "Perplexity of the sampler.", ""),
    ("training_log_ppl", "nats per token", _SEQUENCES, "Log perplexity of the trainer.", ""),
    ("rollout_log_ppl", "nats per token", _SEQUENCES, "Log perplexity of the sampler.", ""),
    ("ppl_ratio", "ratio", _SEQUENCES, "Perplexity of the trainer over that of the sampler.", "near 1"),
    ("log_ppl_diff", "nats per token", _SEQUENCES, "Difference of log perplexities.", "near 0"),
    ("log_ppl_abs_diff", "nats per token", _SEQUENCES, "Absolute difference of log perplexities.", "near 0"),
    ("log_ppl_diff_max", "nats per token", "max over sequences", "Largest difference of log perplexities.", ""),
    ("log_ppl_diff_min", "nats per token", "min over sequences", "Smallest difference of log perplexities.", ""),
    ("chi2_token", "none", _TOKENS, "Squared probability ratio of a token, minus 1.", "near 0"),
    ("chi2_seq", "none", _SEQUENCES, "Squared probability ratio of a sequence, minus 1.", "near 0"),
    ("ratio_mean", "ratio", _TOKENS, "Probability ratio exp(lr) before truncation.", "near 1"),
    ("ratio_max", "ratio", "max over tokens", "Largest exp(lr).", ""),
    ("ratio_eff_sample_size", "share", "squared mean over mean square, tokens", "ESS of the ratios.", "near 1"),
    ("abs_log_ratio_max", "nats", "max over tokens", "Largest absolute lr.", ""),
    ("abs_log_ratio_p50", "nats", "quantile over tokens", "Median of the absolute lr.", ""),
    ("abs_log_ratio_p90", "nats", "quantile over tokens", "90 % quantile of the absolute lr.", ""),
    ("abs_log_ratio_p99", "nats", "quantile over tokens", "99 % quantile of the absolute lr.", ""),
    ("abs_log_ratio_p999", "nats", "quantile over tokens", "99.9 % quantile of the absolute lr.", ""),
)

_WEIGHTS: tuple[Row, ...] = (
    ("rollout_is_mean", "ratio", _TOKENS, "TIS weight before normalisation and rejections.", "near 1"),
    ("rollout_is_std", "ratio", "standard deviation over tokens", "Spread of the TIS weights.", ""),
    ("rollout_is_max", "ratio", "max over tokens", "Largest TIS weight.", ""),
    ("rollout_is_min", "ratio", "min over tokens", "Smallest TIS weight.", ""),
    ("rollout_is_eff_sample_size", "share", "squared mean over mean square, tokens", "ESS of the weights.", "near 1"),
    (
        "rollout_is_ratio_fraction_high",
        "share",
        "mean over tokens; sequences in sequence modes",
        "Ratios above the cap.",
        "near 0",
    ),
    (
        "rollout_is_ratio_fraction_low",
        "share",
        "mean over tokens; sequences in sequence modes",
        "Ratios below the floor.",
        "near 0",
    ),
    ("rollout_is_seq_mean", "ratio", _SEQUENCES, "Mean weight of a sequence.", "near 1"),
    ("rollout_is_seq_std", "ratio", "standard deviation over sequences", "Spread of these means.", ""),
    ("rollout_is_seq_max", "ratio", "max over sequences", "Largest of these means.", ""),
    ("rollout_is_seq_min", "ratio", "min over sequences", "Smallest of these means.", ""),
    ("rollout_is_seq_max_deviation", "ratio", "max over sequences", "Distance of a mean from 1.", ""),
    ("rollout_is_seq_fraction_high", "share", _SEQUENCES, "Mean ratios above the cap.", "near 0"),
    ("rollout_is_seq_fraction_low", "share", _SEQUENCES, "Mean ratios below the floor.", "near 0"),
    ("clip_fraction", "share", _TOKENS, "Ratios outside the bounds.", "near 0"),
    ("rollout_is_oob_ratio", "share", _TOKENS, "The same, under verl's name, in modes with a band.", "near 0"),
    (
        "rollout_is_batch_norm_factor",
        "ratio",
        "mean over tokens; sequences in sequence modes",
        "Divisor of `batch_normalize`.",
        "near 1",
    ),
)

_REJECTED: tuple[Row, ...] = (
    ("kept_fraction", "share", _TOKENS, "Tokens that pass the veto and all rejections.", "near 1"),
    ("veto_seq_fraction", "share", _SEQUENCES, "Sequences that the veto rejects.", "near 0"),
    ("rollout_rs_masked_fraction", "share", _TOKENS, "Tokens that the rejections drop.", "near 0"),
    ("rollout_rs_seq_masked_fraction", "share", _SEQUENCES, "Sequences with dropped tokens.", "near 0"),
)

_AS_STATISTIC = "as the statistic"
_REJECTION: tuple[Row, ...] = (
    ("seq_mean", _AS_STATISTIC, _SEQUENCES, "Statistic of a sequence.", ""),
    ("seq_std", _AS_STATISTIC, "standard deviation over sequences", "Its spread.", ""),
    ("seq_max", _AS_STATISTIC, "max over sequences", "Its largest value.", ""),
    ("seq_min", _AS_STATISTIC, "min over sequences", "Its smallest value.", ""),
    ("seq_max_deviation", _AS_STATISTIC, "max over sequences", "Its largest absolute value.", ""),
    ("seq_fraction_high", "share", _SEQUENCES, "Sequences above the upper bound.", ""),
    ("seq_fraction_low", "share", _SEQUENCES, "Sequences below the lower bound.", ""),
    ("seq_masked_fraction", "share", _SEQUENCES, "Sequences with tokens that this rejection drops.", ""),
    ("mean", _AS_STATISTIC, _TOKENS, "Statistic of a token.", ""),
    ("std", _AS_STATISTIC, "standard deviation over tokens", "Its spread inside the bounds.", ""),
    ("max", _AS_STATISTIC, "max over tokens", "Its largest value.", ""),
    ("min", _AS_STATISTIC, "min over tokens", "Its smallest value.", ""),
    ("fraction_high", "share", "mean over values", "Values above the upper bound.", ""),
    ("fraction_low", "share", "mean over values", "Values below the lower bound.", ""),
    ("masked_fraction", "share", _TOKENS, "Tokens that this rejection drops.", ""),
)

_BY_AGE: tuple[Row, ...] = (
    ("tokens", "tokens", "sum", "Tokens of responses of this staleness; absent if all are fresh.", ""),
    ("weight_mean", "ratio", _TOKENS, "Weight in the loss at this staleness.", "near 1"),
    ("eff_sample_size", "share", "squared mean over mean square, tokens", "ESS at this staleness.", "near 1"),
    ("k3_kl", "nats per token", _TOKENS, "k3 at this staleness; age 0 shows quantisation alone.", ""),
)


_SAMPLE = "mean over sampled tokens"
_RATIOS = "squared mean over mean square, sampled tokens"
_PLAIN = "fresh tokens not at rejected drafts"
_PLAIN_MEAN = f"mean over {_PLAIN}, or over all fresh ones if there are no others"
_PARTS: tuple[Row, ...] = (
    ("tokens", "tokens", "sum", "Tokens of `algorithm.mismatch_sample_tokens`.", ""),
    ("fresh_tokens", "tokens", "sum", "Those sampled from the weights published last; 0 leaves numerics out.", ""),
    ("k3/total", "nats per token", _SAMPLE, "k3 of the sample: the sum of all parts below.", "below 5e-3"),
    ("k3/quantisation", "nats per token", _SAMPLE, "k3 of the trainer against its published weights.", ""),
    ("k3/numerics", "nats per token", _PLAIN_MEAN, "k3 of these weights against the engine.", ""),
    ("k3/stale_{age}", "nats per token", _SAMPLE, "What tokens of this age add to numerics.", ""),
    ("k3/speculation", "nats per token", _SAMPLE, "What tokens at rejected drafts add to numerics.", ""),
    ("k3/interaction", "nats per token", _SAMPLE, "Product of quantisation and all other causes.", "near 0"),
    ("ess/total", "share", _RATIOS, "ESS of the sample's ratios.", "near 1"),
    ("ess/quantisation", "share", _RATIOS, "ESS of the ratios of trainer and published weights.", "near 1"),
    ("ess/numerics", "share", _RATIOS, f"ESS of the ratios of published weights and engine, {_PLAIN}.", "near 1"),
    ("ess/stale_{age}", "share", _RATIOS, "The same of tokens of this age.", "near 1"),
    ("ess/speculation", "share", _RATIOS, "The same of fresh tokens at rejected drafts.", "near 1"),
)


def _under(prefix: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple((prefix + name, unit, reduction, text, healthy) for name, unit, reduction, text, healthy in rows)


MISMATCH: dict[str, tuple[Row, ...]] = {
    "Gap between sampler and trainer": _under("rollout_corr/", _GAP),
    "Correction weights": _under("rollout_corr/", _WEIGHTS),
    "Rejected tokens": (
        *_under("rollout_corr/", _REJECTED),
        *_under("rollout_corr/rollout_rs_{statistic}_", _REJECTION),
    ),
    "Gap by staleness": _under("rollout_corr/stale_{age}/", _BY_AGE),
    "Gap by cause": _under("rollout_corr/part_", _PARTS),
}
"""Titles and rows, in the order of the documentation."""
