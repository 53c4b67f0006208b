"""The metrics of one step by name; verl's names where the meaning is the same.

Counters of dropped, substituted or truncated responses are always present, zero included, so that a missing counter is
never mistaken for zero. Rewards are absent if no response was scored, and the speed of the rollout if the batch was not
sampled in it. Pure. docs/metrics.md lists units and reductions.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, pstdev

from megatron_rl.batching.batch import BatchCounts
from megatron_rl.controller.publish_report import PublishReport
from megatron_rl.trainer.messages import StepResult
from rollout.types import FinishReason, ScoredGroup, ScoreStatus

MOST_SAMPLING = 1.1
"""Most seconds from the first start of a batch's groups to their last end, as a multiple of those of the rollout phase.

A few calls lie between a start and the phase. Groups that began far earlier were not sampled in the phase's seconds, so
tokens over these seconds are no speed. They began while the trainer worked on the step before, or beside an evaluation.
"""


def step_metrics(
    groups: Sequence[ScoredGroup],
    counts: BatchCounts,
    result: StepResult,
    published: PublishReport,
    seconds: dict[str, float],
) -> dict[str, float]:
    """All metrics of a step."""
    return {
        **_rewards(groups),
        **_lengths(groups),
        **{f"batch/{name}": float(value) for name, value in asdict(counts).items()},
        **result.metrics,
        "actor/optimizer_steps": float(result.num_optimizer_steps),
        "actor/skipped_updates": float(result.num_skipped_updates),
        **published.metrics(),
        **_speed(groups, seconds),
    }


def _rewards(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    rewards = [
        reward for group in groups for sample, reward in enumerate(group.rewards) if not group.is_left_out(sample)
    ]
    statuses = [score.status for group in groups for score in group.scores]
    failures = {
        "reward/errors": float(statuses.count(ScoreStatus.ERROR)),
        "reward/timeouts": float(statuses.count(ScoreStatus.TIMEOUT)),
    }
    if not rewards:
        return failures
    details: dict[str, list[float]] = defaultdict(list)
    for score in (score for group in groups for score in group.scores):
        for name, value in score.details:
            details[name].append(value)
    return {
        **{f"reward/detail/{name}": fmean(values) for name, values in details.items()},
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        **failures,
    }


def _lengths(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    lengths = [length for group in groups for length in group.summary.lengths]
    reasons = [reason for group in groups for reason in group.summary.finish_reasons]
    return {
        "response_length/mean": fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/min": float(min(lengths)),
        "response_length/clip_ratio": reasons.count(FinishReason.LENGTH) / len(reasons),
        "prompt_length/mean": fmean(group.summary.num_prompt_tokens for group in groups),
    }


def _speed(groups: Sequence[ScoredGroup], seconds: dict[str, float]) -> dict[str, float]:
    tokens = sum(sum(group.summary.lengths) for group in groups)
    first_s = min(group.summary.started_at_s for group in groups)
    last_s = max(group.summary.finished_at_s for group in groups)
    metrics = {f"timing_s/{phase}": value for phase, value in seconds.items()}
    metrics["perf/response_tokens"] = float(tokens)
    if last_s - first_s <= MOST_SAMPLING * seconds["rollout"]:
        metrics["perf/rollout_tokens_s"] = tokens / seconds["rollout"]
    metrics["perf/throughput_tokens_s"] = tokens / seconds["step"]
    return metrics
