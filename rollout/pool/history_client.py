"""The controller's end of the history: which prompts it should have ready, what came of the last step.

Translates groups into keys and rewards for `history.store.service`, and adds up what engines drafted. Everything
that the loop calls returns at once but for `metrics`, which waits a moment for reports.
"""

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
"""Fewer lengths have no rank correlation worth the name."""


class HistoryClient:
    """One run's engines and their history."""

    def __init__(self, service: HistoryService, engines: EngineGroup) -> None:
        self._service = service
        self._engines = engines
        self._num_evictions = self._num_lost_calls = 0

    def connect(self) -> None:
        """Have the engines send their finished responses to the shards."""
        self._engines.connect_history(self._service.shards, timeout_s=ANSWER_TIMEOUT_S)

    def prefetch(self, prompts: Iterable[Prompt]) -> None:
        """Make the history of these prompts ready, in this order, and put that of others away."""
        self._service.publish_segments([prompt_key(prompt.prompt_id) for prompt in prompts])

    def begin_rollout(self) -> None:
        """What engines drafted before, in an evaluation, is not the step's."""
        self._engines.begin_draft_stats()

    def record_rewards(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """The step's groups are whole and have these rewards; their tokens came from the engines long ago."""
        self._service.note_rewards(step, {prompt_key(one.group.prompt.prompt_id): one.rewards for one in groups})

    def metrics(self) -> dict[str, float]:
        """What was drafted since `begin_rollout`, and the state of the history."""
        drafted = self._engines.wait(self._engines.begin_draft_stats(), timeout_s=ANSWER_TIMEOUT_S)
        lost = self._engines.lost_history_calls(timeout_s=ANSWER_TIMEOUT_S)
        report = self._service.report()
        return {
            **sum(drafted.values(), DraftStats()).metrics(),
            **self._state_metrics(report, sum(lost.values())),
            **return_metrics(report.returns),
        }

    def _state_metrics(self, report: ServiceReport, num_lost_by_engines: int) -> dict[str, float]:
        num_lost_calls = report.num_lost_calls + num_lost_by_engines
        found = {
            "history/bytes": float(report.stats.num_bytes),
            "history/prompts": float(report.stats.num_prompts),
            "history/segment_bytes": float(report.segment_bytes),
            # a shard that was started again counts from 0
            "history/evictions": float(max(report.stats.num_evictions - self._num_evictions, 0)),
            "history/lost_calls": float(max(num_lost_calls - self._num_lost_calls, 0)),
        }
        self._num_evictions, self._num_lost_calls = report.stats.num_evictions, num_lost_calls
        return found


def return_metrics(returns: Sequence[Return]) -> dict[str, float]:
    """How much of this visit the last one foretold; a figure that nothing can be said about is left out."""
    measured = [one for one in returns if one.reusable_share == one.reusable_share]
    found = {}
    if tokens := sum(one.num_tokens for one in measured):
        found["history/reusable_share"] = sum(one.reusable_share * one.num_tokens for one in measured) / tokens
    if len(returns) >= _FEWEST_RETURNS:
        before, now = [one.mean_length_before for one in returns], [one.mean_length for one in returns]
        found["history/length_rank_correlation"] = rank_correlation(before, now)
    return {name: value for name, value in found.items() if value == value}
