"""The controller's access to the history: prompts to prefetch, rewards of a step, metrics.

Translates groups into keys and rewards for `history.store.service`, and sums the draft counters of engines. All calls
of the loop return at once except `metrics`, which waits for reports.
"""

import math
from collections.abc import Iterable, Sequence

from history.drafting.stats import DraftStats
from history.lengths.reuse import rank_correlation
from history.store.prompt_store import Return
from history.store.service import HistoryService, ServiceReport
from history.types import prompt_key
from rollout.pool.engine_group import EngineGroup
from rollout.types import Prompt, ScoredGroup

ANSWER_TIMEOUT_S = 30.0
_FEWEST_RETURNS = 3
"""Least number of lengths for a rank correlation."""


class HistoryClient:
    """One run's engines and their history."""

    def __init__(self, service: HistoryService, engines: EngineGroup) -> None:
        self._service = service
        self._engines = engines
        self._num_evictions = self._num_lost_calls = self._num_left_out = 0

    def connect(self) -> None:
        """Let the engines send finished responses to the shards."""
        self._engines.connect_history(self._service.shards, timeout_s=ANSWER_TIMEOUT_S)

    def prefetch(self, prompts: Iterable[Prompt]) -> None:
        """Publish the history of these prompts, in this order, and remove that of others."""
        self._service.publish_segments([prompt_key(prompt.prompt_id) for prompt in prompts])

    def begin_rollout(self) -> None:
        """Reset the draft counters, so that drafts of an evaluation do not count for the step."""
        self._engines.reset_draft_stats()

    def record_rewards(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Send the rewards of a step's groups; the engines have already sent the tokens."""
        rewards = {prompt_key(scored.group.prompt.prompt_id): scored.rewards for scored in groups}
        self._service.note_rewards(step, rewards)

    def metrics(self) -> dict[str, float]:
        """Draft metrics since `begin_rollout`, and metrics of the history."""
        drafted = self._engines.draft_stats(timeout_s=ANSWER_TIMEOUT_S)
        lost = self._engines.lost_history_calls(timeout_s=ANSWER_TIMEOUT_S)
        report = self._service.report()
        return {
            **sum(drafted.values(), DraftStats()).metrics(),
            **self._state_metrics(report, sum(lost.values())),
            **return_metrics(report.returns),
        }

    def _state_metrics(self, report: ServiceReport, num_lost_by_engines: int) -> dict[str, float]:
        num_lost_calls = report.num_lost_calls + num_lost_by_engines
        metrics = {
            "history/bytes": float(report.stats.num_bytes),
            "history/prompts": float(report.stats.num_prompts),
            "history/segment_bytes": float(report.segment_bytes),
            # a restarted shard counts from 0
            "history/evictions": float(max(report.stats.num_evictions - self._num_evictions, 0)),
            "history/left_out_segments": float(max(report.num_left_out - self._num_left_out, 0)),
            "history/lost_calls": float(max(num_lost_calls - self._num_lost_calls, 0)),
        }
        self._num_evictions, self._num_lost_calls = report.stats.num_evictions, num_lost_calls
        self._num_left_out = report.num_left_out
        return metrics


def return_metrics(returns: Sequence[Return]) -> dict[str, float]:
    """How well the previous visit of each prompt predicted this visit; unknown figures are left out."""
    measured = [visit for visit in returns if not math.isnan(visit.reusable_share)]
    metrics = {}
    if tokens := sum(visit.num_tokens for visit in measured):
        metrics["history/reusable_share"] = sum(visit.reusable_share * visit.num_tokens for visit in measured) / tokens
    if len(returns) >= _FEWEST_RETURNS:
        before, now = [visit.mean_length_before for visit in returns], [visit.mean_length for visit in returns]
        metrics["history/length_rank_correlation"] = rank_correlation(before, now)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
