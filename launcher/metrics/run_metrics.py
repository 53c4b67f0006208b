"""Rows of the registry for evaluation, rewards, batches, training and publishing.

A row is: name, unit, reduction, meaning, healthy value.
"""

Row = tuple[str, str, str, str, str]

_REWARD: tuple[Row, ...] = (
    ("reward/mean", "reward", "mean over responses", "Reward of the step's responses.", ""),
    ("reward/std", "reward", "standard deviation over responses", "Spread of the rewards.", ""),
    ("reward/max", "reward", "max over responses", "Highest reward.", ""),
    ("reward/min", "reward", "min over responses", "Lowest reward.", ""),
    (
        "reward/detail/{name}",
        "any",
        "mean over responses that have it",
        "A further number that the reward function returned beside `score`.",
        "",
    ),
    ("reward/errors", "responses", "sum", "Calls of the reward function that failed.", "0"),
    ("reward/timeouts", "responses", "sum", "Calls of the reward function over their time or CPU seconds.", "0"),
    ("reward/scorer_restarts", "restarts", "total", "Restarts of the scorers' own processes.", "0"),
    ("reward/text_actor_restarts", "restarts", "total", "Restarts of the process that writes samples.", "0"),
    ("reward/steps_without_samples", "steps", "total", "Steps whose samples were lost with a node, all or some.", "0"),
    ("reward/worker_restarts", "restarts", "total", "Reward workers that were killed at a limit, or died.", "0"),
    (
        "reward/repeated_calls",
        "responses",
        "total",
        "Calls of the reward function that ran again, because their worker was lost and they were not to blame.",
        "0",
    ),
    (
        "reward/stray_processes",
        "processes",
        "total",
        "Processes that calls of the reward function left behind, and that were killed.",
        "0",
    ),
    ("response_length/mean", "tokens", "mean over responses", "Length of the responses.", ""),
    ("response_length/max", "tokens", "max over responses", "Longest response.", ""),
    ("response_length/min", "tokens", "min over responses", "Shortest response.", ""),
    ("response_length/clip_ratio", "share", "mean over responses", "Responses that reached the token limit.", ""),
    ("prompt_length/mean", "tokens", "mean over groups", "Length of the prompts.", ""),
)

_BATCH: tuple[Row, ...] = (
    ("batch/groups", "groups", "sum", "Groups of the step.", ""),
    ("batch/responses", "responses", "sum", "Responses of the step.", ""),
    ("batch/aborted_responses", "responses", "sum", "Responses that are dropped as aborted or empty.", "0"),
    (
        "batch/unscored_responses",
        "responses",
        "sum",
        "Responses that are left out because their scoring failed.",
        "0",
    ),
    (
        "batch/zero_variance_groups",
        "groups",
        "sum",
        "Groups that the filter drops and whose advantages are all 0 or, where they are unknown, rewards all equal.",
        "",
    ),
    (
        "batch/zero_variance_responses",
        "responses",
        "sum",
        "Responses of the groups in `batch/zero_variance_groups`.",
        "",
    ),
    ("batch/filtered_groups", "groups", "sum", "Groups that the filter drops for another reason.", ""),
    ("batch/filtered_responses", "responses", "sum", "Responses of groups that are dropped for another reason.", ""),
    (
        "batch/masked_truncated_responses",
        "responses",
        "sum",
        "Responses that are left out of the loss because they reached the token limit.",
        "",
    ),
    ("batch/trained_responses", "responses", "sum", "Responses in the loss.", ""),
    ("batch/trained_tokens", "response tokens", "sum", "Tokens in the loss.", ""),
    ("batch/max_staleness", "policy versions", "max over trained responses", "Largest staleness.", ""),
    ("batch/mean_staleness", "policy versions", "mean over trained responses", "Mean staleness.", ""),
    (
        "batch/micro_batches",
        "micro batches",
        "sum over one epoch of one data-parallel rank",
        "Micro batches of the step.",
        "",
    ),
    (
        "batch/micro_batch_fill",
        "share",
        "mean over micro batches",
        "Tokens over the token limit of a micro batch.",
        "near 1",
    ),
    (
        "batch/rank_imbalance",
        "ratio",
        "max over mini batches",
        "Predicted time of the slowest data-parallel rank over the mean, minus 1.",
        "near 0",
    ),
)

_TRAINING: tuple[Row, ...] = (
    ("actor/pg_loss", "as `algorithm.aggregation`", "mean over optimizer steps", "Policy loss.", ""),
    ("actor/entropy", "nats per token", "mean over tokens and optimizer steps", "Entropy of the policy.", ""),
    ("actor/ppo_kl", "nats per token", "mean over tokens and optimizer steps", "KL from the policy at step start.", ""),
    (
        "actor/pg_clipfrac",
        "share",
        "mean over tokens and optimizer steps",
        "Tokens that the loss clips; with `gmpo` those with a positive advantage.",
        "",
    ),
    (
        "actor/pg_clipfrac_lower",
        "share",
        "mean over tokens and optimizer steps",
        "Tokens of the dual clip; with `gmpo` clipped tokens with a negative advantage.",
        "",
    ),
    (
        "actor/kl_loss",
        "as `algorithm.aggregation`",
        "mean over optimizer steps",
        "Divergence from the reference policy in the loss, without its coefficient.",
        "",
    ),
    ("actor/kl", "nats per token", "mean over tokens and optimizer steps", "The same as a mean over tokens.", ""),
    (
        "actor/reward_kl_penalty",
        "nats per token",
        "mean over tokens",
        "Divergence from the reference policy in the reward, without its coefficient.",
        "",
    ),
    ("actor/reward_kl_bounded", "tokens", "sum", "Tokens whose k3 in the reward is bounded at 10.", "near 0"),
    ("actor/kl_coef", "coefficient", "last", "Coefficient of the divergence in this step.", ""),
    ("actor/entropy_coeff", "coefficient", "last", "Coefficient of the entropy bonus in this step.", ""),
    ("actor/grad_norm", "gradient norm", "mean over optimizer steps", "Norm of the gradient before clipping.", ""),
    ("actor/lr", "learning rate", "last", "Learning rate of the last optimizer step.", ""),
    ("actor/optimizer_steps", "updates", "sum", "Optimizer steps.", ""),
    ("actor/skipped_updates", "updates", "sum", "Updates without a finite gradient, which are skipped.", "0"),
    ("critic/vf_loss", "as `algorithm.aggregation`", "mean over optimizer steps", "Loss of the critic.", "falls"),
    ("critic/vf_clipfrac", "share", "mean over tokens and optimizer steps", "Tokens that the value loss clips.", ""),
    ("critic/vpred_mean", "reward", "mean over tokens and optimizer steps", "Values while the critic learns.", ""),
    ("critic/values/mean", "reward", "mean over tokens", "Values before the step's first update.", ""),
    ("critic/returns/mean", "reward", "mean over tokens", "Returns that the critic learns to predict.", ""),
    (
        "critic/vf_explained_var",
        "ratio",
        "over the tokens of the step",
        "Share of the variance of returns that the values explain.",
        "towards 1",
    ),
    ("critic/grad_norm", "gradient norm", "mean over optimizer steps", "Norm of the critic's gradient.", ""),
    ("critic/lr", "learning rate", "last", "Learning rate of the critic's last optimizer step.", ""),
    ("critic/skipped_updates", "updates", "sum", "Updates of the critic without a finite gradient.", "0"),
    ("sft/loss", "nats per token", "mean over tokens", "Cross-entropy of supervised training (`sft` only).", "falls"),
)

_PUBLISH: tuple[Row, ...] = (
    ("publish/weight_version", "version", "last", "Weight version of the last publish.", ""),
    (
        "publish/wire_bytes",
        "bytes",
        "sum over trainer ranks",
        "Bytes that trainer ranks wrote to shared memory, or to sockets or links for each receiver.",
        "",
    ),
    (
        "publish/received_bytes_max",
        "bytes",
        "max over engine ranks",
        "Bytes that an engine rank read from shared memory, or received.",
        "",
    ),
    (
        "publish/delta_declined",
        "0 or 1",
        "last publish",
        "All weights were sent in spite of `publish.delta`, because deltas would be slower.",
        "",
    ),
    ("publish/in_flight", "responses", "sum over engines", "Responses that the publish interrupted.", ""),
    ("publish/recomputed_tokens", "tokens", "sum over engines", "Tokens that a publish made engines recompute.", ""),
    (
        "publish/weight_gap_max",
        "ratio",
        "max over engines and weight sums",
        "Relative difference of weight sums from the trainer's.",
        "",
    ),
    (
        "publish/probe_gap_max",
        "nats per token",
        "max over engines of the mean over probe tokens",
        "Gap of log-probabilities for one fixed prompt.",
        "below `engine.probe_max_logprob_gap` times the spread; with FP8 keys and values both bounds, in squares",
    ),
    ("publish/sqnr_db", "dB", "ratio of sums over sampled codes", "Signal over quantisation noise of the model.", ""),
    ("publish/sqnr_db/layer_{layer}", "dB", "ratio of sums over sampled codes", "The same for one layer.", ""),
    (
        "publish/sqnr_db_min",
        "dB",
        "min over layers",
        "The worst layer; 300 means lossless.",
        "about 30 for FP8, 40 for INT8",
    ),
    ("publish/saturated_share", "share", "mean over sampled codes", "Codes of the largest magnitude.", ""),
    ("publish/changed_share", "share", "mean over sampled codes", "Codes that the last step changed.", ""),
    (
        "publish/as_is_share",
        "share",
        "mean over sampled codes of FP8 weights",
        "Codes that are sent as the trainer holds them.",
        "1 for FP8 weights with equal blocks",
    ),
    ("publish/repeated", "publishes", "total", "Publishes that were repeated because an engine died.", "0"),
)

_EVALUATION: tuple[Row, ...] = tuple(
    (f"eval/{{set}}/{part}{{format}}/{figure}", unit, reduction, meaning, "")
    for part in ("", "{source}/")
    for figure, unit, reduction, meaning in (
        (
            "avg@{k}",
            "score",
            "mean over all samples",
            "Mean score of single samples, `acc` where there is one.",
        ),
        ("pass@{k}", "share", "mean over prompts", "Prompts with at least one right sample of k."),
        ("truncated", "share", "mean over all samples", "Samples that reached the token limit."),
        ("mean_length", "tokens", "mean over all samples", "Length of the samples."),
    )
)

_GUARD: tuple[Row, ...] = (
    ("guard/level", "none", "last step", "Actions of `algorithm.guard` in force, or advised; absent if off.", "0"),
    ("guard/actions", "none", "sum since the run's start", "Actions taken and taken back, or advised.", "0"),
    ("guard/bad_steps", "steps", "last step", "Bad steps in a row since the last action.", "0"),
)

SECTIONS: dict[str, tuple[Row, ...]] = {
    "Evaluation (wandb and `evaluation.jsonl`)": _EVALUATION,
    "Rewards and lengths": _REWARD,
    "Batch": _BATCH,
    "Training": _TRAINING,
    "Guard of the mismatch": _GUARD,
    "Publishing": _PUBLISH,
}
"""Titles and rows, in the order of the documentation."""
