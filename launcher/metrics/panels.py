"""The panels of a dashboard. The wandb workspace and the offline page are both made from this list."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart over steps."""

    title: str
    metrics: tuple[str, ...]
    """Names of the registry (`launcher.metrics.registry`), all of one unit."""
    log: bool = False
    """Logarithmic axis; values that are not positive are left out."""
    stacked: bool = False
    """The metrics are parts of a whole, and are drawn as areas."""


def _panel(title: str, *metrics: str, log: bool = False, stacked: bool = False) -> Panel:
    return Panel(title=title, metrics=metrics, log=log, stacked=stacked)


DASHBOARD: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        _panel("Reward", "reward/mean", "reward/max", "reward/min"),
        _panel("Response length", "response_length/mean", "response_length/max"),
        _panel("Responses at the token limit", "response_length/clip_ratio"),
        _panel("Entropy", "actor/entropy"),
        _panel("Policy loss", "actor/pg_loss"),
        _panel("Gradient norm", "actor/grad_norm"),
        _panel("Learning rate", "actor/lr"),
        _panel("Clipped tokens", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"),
    ),
    "Mismatch": (
        _panel("k3, sampler to trainer", "rollout_corr/k3_kl", log=True),
        _panel("Effective sample size", "rollout_corr/rollout_is_eff_sample_size"),
        _panel(
            "k3 by cause",
            *(f"rollout_corr/part_k3/{part}" for part in ("quantisation", "numerics", "stale_1", "speculation")),
            stacked=True,
        ),
        _panel("Absolute log ratio", "rollout_corr/abs_log_ratio_p99", "rollout_corr/abs_log_ratio_max", log=True),
        _panel("Truncated ratios", "rollout_corr/clip_fraction"),
        _panel("Tokens that pass veto and rejections", "rollout_corr/kept_fraction"),
        _panel("Level of the guard", "guard/level"),
        _panel("k3 at staleness 0 and 1", "rollout_corr/stale_0/k3_kl", "rollout_corr/stale_1/k3_kl", log=True),
    ),
    "Rollout speed and drafts": (
        _panel("Tokens per second", "perf/throughput_tokens_s", "perf/rollout_tokens_s"),
        _panel("Tokens per forward", "history/tokens_per_forward"),
        _panel("Acceptance of drafts", "history/acceptance_rate"),
        _panel("Requests with a history", "history/hit_rate"),
        _panel("Seconds saved by drafts", "history/saved_s_estimated", "history/saved_s_measured"),
        _panel("Memory of the history", "history/bytes", "history/segment_bytes"),
    ),
    "Planner and staleness": (
        _panel("Staleness", "batch/mean_staleness", "batch/max_staleness"),
        _panel("Groups ahead", "planner/groups_ahead"),
        _panel("Moved groups", "planner/moved_groups"),
        _panel(
            "Groups without signal", "refill/groups_without_signal", "refill/missing_groups", "refill/outdated_groups"
        ),
        _panel("Correlation of length forecasts", "planner/forecast_correlation"),
        _panel("Fill of micro batches", "batch/micro_batch_fill"),
        _panel("Imbalance of trainer ranks", "batch/rank_imbalance"),
    ),
    "Publish": (
        _panel(
            "Seconds by stage",
            *(f"timing_s/publish_{stage}" for stage in ("scales", "pack", "send", "pause", "apply", "probe")),
        ),
        _panel("Bytes sent", "publish/wire_bytes"),
        _panel("Signal over quantisation noise", "publish/sqnr_db", "publish/sqnr_db_min"),
        _panel("Changed and saturated codes", "publish/changed_share", "publish/saturated_share"),
        _panel("Gap of the probe", "publish/probe_gap_max", log=True),
    ),
    "Where time went": (
        _panel(
            "Seconds by phase",
            *(f"timing_s/{phase}" for phase in ("step", "rollout", "train", "publish", "switch")),
        ),
        _panel(
            "Seconds between steps",
            *(f"timing_s/{activity}_before_step" for activity in ("evaluate", "checkpoint", "publish", "switch")),
        ),
        _panel("Bubble of the engines' time", "timeline/bubble", "timeline/idle_share", "timeline/tail_share"),
        _panel(
            "Bubble by cause",
            *(f"timeline/{cause}_share" for cause in ("underfilled", "tail_wait", "publish", "trainer_wait")),
            *(f"timeline/{cause}_share" for cause in ("checkpoint", "gap", "other")),
            stacked=True,
        ),
    ),
    "Faults": (
        _panel("Failed and late rewards", "reward/errors", "reward/timeouts"),
        _panel("Aborted responses", "batch/aborted_responses"),
        _panel("Skipped updates", "actor/skipped_updates"),
        _panel("Restarted engines", "engine/restarts"),
        _panel("Serving engines", "engine/serving"),
        _panel("Lost nodes", "cluster/lost_nodes"),
        _panel("Repeated publishes", "publish/repeated"),
        _panel("Groups that began again", "engine/reissued_groups"),
        _panel("Preempted requests", "engine/preempted"),
        _panel("Lost calls of the history", "history/lost_calls"),
        _panel("Segments without room or damaged", "history/left_out_segments", "history/damaged_segments"),
    ),
}
"""Panels by section."""
