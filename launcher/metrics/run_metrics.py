"""Rows of the registry for all metrics but those of the gap between sampler and trainer.

A row is: name, unit, reduction, meaning, healthy value.
"""

Row = tuple[str, str, str, str, str]

_REWARD: tuple[Row, ...] = (
    ("reward/mean", "reward", "mean over responses", "Reward of the step's responses.", ""),
    ("reward/std", "reward", "standard deviation over responses", "Spread of the rewards.", ""),
    ("reward/max", "reward", "max over responses", "Highest reward.", ""),
    ("reward/min", "reward", "min over responses", "Lowest reward.", ""),
    ("reward/errors", "responses", "sum", "Calls of the reward function that failed.", "0"),
    ("reward/timeouts", "responses", "sum", "Calls of the reward function over their time or CPU seconds.", "0"),
    ("reward/scorer_restarts", "restarts", "total", "Restarts of the scorers' own processes.", "0"),
    ("reward/text_actor_restarts", "restarts", "total", "Restarts of the process that writes samples.", "0"),
    ("reward/worker_restarts", "restarts", "total", "Reward workers that were killed at a limit, or died.", "0"),
    (
        "reward/repeated_calls",
        "responses",
        "total",
        "Calls of the reward function that ran again, because another one ended their worker.",
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
    ("batch/zero_variance_groups", "groups", "sum", "Groups that are dropped because all advantages are zero.", ""),
    ("batch/zero_variance_responses", "responses", "sum", "Responses of groups without variance.", ""),
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
    ("actor/pg_clipfrac", "share", "mean over tokens and optimizer steps", "Tokens that the loss clips.", ""),
    ("actor/pg_clipfrac_lower", "share", "mean over tokens and optimizer steps", "Tokens of the dual clip.", ""),
    ("actor/grad_norm", "gradient norm", "mean over optimizer steps", "Norm of the gradient before clipping.", ""),
    ("actor/lr", "learning rate", "last", "Learning rate of the last optimizer step.", ""),
    ("actor/optimizer_steps", "updates", "sum", "Optimizer steps.", ""),
    ("actor/skipped_updates", "updates", "sum", "Updates without a finite gradient, which are skipped.", "0"),
    ("sft/loss", "nats per token", "mean over tokens", "Cross-entropy of supervised training (`sft` only).", "falls"),
)

_PUBLISH: tuple[Row, ...] = (
    ("publish/weight_version", "version", "last", "Weight version of the last publish.", ""),
    ("publish/wire_bytes", "bytes", "sum over trainer ranks", "Bytes that a publish sends.", ""),
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
        "below `engine.probe_max_logprob_gap`",
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

_ENGINES: tuple[Row, ...] = (
    ("trainer/restarts", "restarts", "total", "Restarts of all trainer ranks from the newest checkpoint.", "0"),
    (
        "checkpoint/save_s",
        "seconds",
        "max over trainer ranks",
        "From the begin of a save to its last file; in the row after its end.",
        "",
    ),
    (
        "checkpoint/blocked_s",
        "seconds",
        "sum",
        "Of this save, in which the run waited: copies, the history's snapshot, the end.",
        "small beside `timing_s/step`",
    ),
    ("checkpoint/waits", "saves", "total", "Saves that waited for the save before them.", "0"),
    ("trainer/repeated_steps", "steps", "total", "Finished steps that these restarts repeated.", "0"),
    ("engine/restarts", "engines", "total", "Restarted engines, without those of lost nodes.", "0"),
    ("engine/serving", "engines", "last", "Engines that were not given up after the loss of their node.", "all"),
    ("cluster/lost_nodes", "nodes", "total", "Nodes that the run has lost since its process started.", "0"),
    ("engine/hung", "engines", "total", "Engines that lived but did nothing, and were ended; see docs/faults.md.", "0"),
    ("engine/reissued_groups", "groups", "total", "Groups that began again or continued elsewhere.", "0"),
    ("planner/moved_groups", "groups", "total", "Groups that migrated to another engine.", ""),
    ("planner/groups_ahead", "groups", "last", "Groups that are admitted and not yet trained on.", ""),
    ("planner/head_start", "share", "last", "Share of the next step that starts early.", ""),
    ("planner/waits_for_age", "waits", "total", "Waits for a group at the staleness bound (`flexible`).", ""),
    (
        "planner/forecast_error",
        "nats",
        "median over trained groups",
        "Absolute logarithm of expected over measured length.",
        "falls",
    ),
    (
        "planner/forecast_correlation",
        "correlation",
        "over trained groups",
        "Rank correlation of expected and measured lengths.",
        "rises",
    ),
)

_DRAFTS: tuple[Row, ...] = (
    ("history/tokens_per_forward", "tokens", "mean over decoding rows", "1 without drafts.", "above 1"),
    ("history/drafted_tokens", "tokens", "sum", "Draft tokens that engines verified.", ""),
    ("history/accepted_tokens", "tokens", "sum", "Draft tokens that engines accepted.", ""),
    ("history/acceptance_rate", "share", "mean over draft tokens", "Accepted over drafted tokens.", ""),
    ("history/accepted_share/{source}", "share", "mean over accepted tokens", "Accepted tokens of one source.", ""),
    (
        "history/calibration_error",
        "probability",
        "mean over draft tokens",
        "Distance of predicted and observed acceptance.",
        "near 0",
    ),
    (
        "history/hit_rate",
        "share",
        "mean over requests",
        "Requests whose prompt has a history.",
        "rises after the first epoch",
    ),
    ("history/propose_s", "seconds", "sum over engines", "Time to propose drafts.", ""),
    ("history/saved_s_estimated", "seconds", "sum over engines", "Saving of drafts by the cost model.", ""),
    ("history/saved_s_measured", "seconds", "sum", "Saving against engines without drafts, where there are any.", ""),
    ("history/damaged_segments", "segments", "sum over engines", "Segments that readers refused.", "0"),
    ("history/lost_calls", "calls", "sum", "Calls that a history process did not answer.", "0"),
    ("history/bytes", "bytes", "last, sum over shards", "Memory of the stored responses.", ""),
    ("history/prompts", "prompts", "last, sum over shards", "Prompts with stored responses.", ""),
    ("history/segment_bytes", "bytes", "last, sum over nodes", "Shared memory of published segments.", ""),
    ("history/left_out_segments", "segments", "sum over nodes", "Segments without room in `/dev/shm`.", "0"),
    (
        "history/built_segments",
        "segments",
        "sum over nodes",
        "Segments that readers built.",
        "prompts of a step with a history",
    ),
    (
        "history/displaced_groups",
        "groups",
        "sum",
        "Groups that began on another node than planned; their segments are built there on demand.",
        "few",
    ),
    ("history/evictions", "prompts", "sum", "Prompts that the byte budget removed.", ""),
    (
        "history/reusable_share",
        "share",
        "mean over tokens",
        "Tokens that the prompts' previous visit already contained.",
        "",
    ),
    (
        "history/length_rank_correlation",
        "correlation",
        "over prompts",
        "Mean lengths of this visit against the previous one.",
        "",
    ),
)

_SPEED: tuple[Row, ...] = (
    ("perf/response_tokens", "tokens", "sum", "Sampled tokens.", ""),
    ("perf/rollout_tokens_s", "tokens per second", "sum of tokens over seconds", "Rate over the rollout phase.", ""),
    ("perf/throughput_tokens_s", "tokens per second", "sum of tokens over seconds", "Rate over the step.", ""),
    (
        "perf/attention_parity_tokens",
        "tokens",
        "fit over all steps, last trainer rank",
        "Attention cost, fitted to micro-batch times.",
        "",
    ),
    (
        "perf/train_seconds_per_mtoken",
        "seconds per million tokens",
        "fit over all steps, last trainer rank",
        "Linear part of micro-batch times.",
        "",
    ),
    (
        "perf/micro_batch_overhead_s",
        "seconds",
        "fit over all steps, last trainer rank",
        "Constant part of micro-batch times.",
        "",
    ),
    ("timing_s/step", "seconds", "sum", "From the begin of the step to this row.", ""),
    ("timing_s/rollout", "seconds", "sum", "The controller waits for scored groups.", ""),
    ("timing_s/train", "seconds", "sum", "The trainer trains.", ""),
    ("timing_s/publish", "seconds", "sum", "Weights are sent to the engines.", ""),
    ("timing_s/switch", "seconds", "sum", "Shared devices change between trainer and engines.", ""),
    (
        "timing_s/evaluate_before_step",
        "seconds",
        "sum",
        "Evaluations between the previous row and this step; the last one is in `events.jsonl` only.",
        "",
    ),
    (
        "timing_s/checkpoint_before_step",
        "seconds",
        "sum",
        "The run waited for checkpoints between the previous row and this step; the last is in `events.jsonl` only.",
        "",
    ),
    ("timing_s/publish_scales", "seconds", "max over trainer ranks", "Stage of a publish: scales.", ""),
    ("timing_s/publish_pack", "seconds", "max over trainer ranks", "Stage of a publish: codes into buckets.", ""),
    ("timing_s/publish_send", "seconds", "max over trainer ranks", "Stage of a publish: bytes are sent.", ""),
    ("timing_s/publish_pause", "seconds", "max over engines", "Stage of a publish: the engine pauses.", ""),
    ("timing_s/publish_apply", "seconds", "max over engines", "Stage of a publish: the engine loads.", ""),
    ("timing_s/publish_drain", "seconds", "last publish", "Stage of a publish: running forwards end.", ""),
    ("timing_s/publish_deliver", "seconds", "last publish", "Stage of a publish, from first to last byte.", ""),
    ("timing_s/publish_probe", "seconds", "last publish", "Stage of a publish: the probe.", ""),
)

_OVER_ENGINES = "mean over engines"
_TIMELINE: tuple[Row, ...] = (
    ("timeline/elapsed_s", "seconds", "sum", "Time since the previous row: the whole of the shares below.", ""),
    (
        "timeline/bubble",
        "share",
        _OVER_ENGINES,
        "Lost time: all rows below except `idle_share` and `tail_share`.",
        "near 0",
    ),
    ("timeline/underfilled_share", "share", _OVER_ENGINES, "Forwards that too few requests share.", ""),
    ("timeline/tail_wait_share", "share", _OVER_ENGINES, "No request while other engines sample.", ""),
    ("timeline/publish_share", "share", _OVER_ENGINES, "A pause for new weights, or waking up for them.", ""),
    ("timeline/trainer_wait_share", "share", _OVER_ENGINES, "No request while the trainer works.", ""),
    ("timeline/checkpoint_share", "share", _OVER_ENGINES, "No request while the run waits for a checkpoint.", ""),
    ("timeline/gap_share", "share", _OVER_ENGINES, "Between two forwards, for less than 0.1 s.", ""),
    ("timeline/other_share", "share", _OVER_ENGINES, "No request for another reason.", ""),
    (
        "timeline/idle_share",
        "share",
        _OVER_ENGINES,
        "No forward: all rows above except `bubble` and `underfilled_share`.",
        "",
    ),
    ("timeline/tail_share", "share", _OVER_ENGINES, "The tail: `underfilled_share` + `tail_wait_share`.", ""),
    (
        "timeline/saturated_requests",
        "requests",
        "max over forwards",
        "Concurrency of a saturated engine in the fitted speed.",
        "",
    ),
)

_EVALUATION: tuple[Row, ...] = tuple(
    (f"eval/{{set}}/{part}{{format}}/{figure}", unit, reduction, meaning, "")
    for part in ("", "{source}/")
    for figure, unit, reduction, meaning in (
        ("avg@{k}", "score", "mean over all samples", "Accuracy by single samples."),
        ("pass@{k}", "share", "mean over prompts", "Prompts with at least one right sample of k."),
        ("truncated", "share", "mean over all samples", "Samples that reached the token limit."),
        ("mean_length", "tokens", "mean over all samples", "Length of the samples."),
    )
)

SECTIONS: dict[str, tuple[Row, ...]] = {
    "Evaluation (wandb and `evaluation.jsonl`)": _EVALUATION,
    "Rewards and lengths": _REWARD,
    "Batch": _BATCH,
    "Training": _TRAINING,
    "Publishing": _PUBLISH,
    "Engines and planner": _ENGINES,
    "Drafts from history": _DRAFTS,
    "Speed and time": _SPEED,
    "Timeline": _TIMELINE,
}
"""Titles and rows, in the order of the documentation."""
