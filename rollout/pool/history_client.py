"""The controller's access to the history: segments beside the engines that use them, rewards of a step, metrics.

Translates groups into keys and rewards for `history.store.service`, and sums the draft counters of engines. All calls
of the loop return at once except `metrics`, which waits for reports.

A reader builds the segments that engines of its node will use:

    the trainer begins       `prefetch`: for the plan of the next step as it would be now; built while the trainer works
    groups are admitted      `place`: for the plan as it is; without sampling ahead the two are equal
    an engine begins a group `started`: the segment is built on demand if the group was planned for another node

A segment that comes late, or never, changes no response, because engines verify drafts.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

from history.drafting.stats import DraftStats
from history.lengths.reuse import rank_correlation
from history.store.prompt_store import Return
from history.store.service import HistoryService, ServiceReport
from history.types import SegmentOrder, prompt_key
from rollout.pool.engine_group import EngineGroup
from rollout.types import PromptGroup, ScoredGroup

Homes = Mapping[int, Sequence[PromptGroup]]
"""By engine number, the groups that it samples or is to sample, in the order of starting."""

ANSWER_TIMEOUT_S = 30.0
_FEWEST_RETURNS = 3
"""Least number of lengths for a rank correlation."""


class HistoryClient:
    """One run's engines and their history."""

    def __init__(self, service: HistoryService, engines: EngineGroup) -> None:
        self._service = service
        self._engines = engines
        self._ordered: defaultdict[str, set[int]] = defaultdict(set)
        """By node, the prompts whose segments are published there."""
        self._num_evictions = self._num_lost_calls = self._num_built = self._num_left_out = 0
        self._num_displaced = 0
        """Groups that began on another node than planned, since the last metrics."""
        self._num_unread = 0
        """Of these, groups on a node without a reader, since the start."""
        self._lost_by_engine: dict[int, int] = {}
        """Calls that no shard received, since the engine's start, as each engine said last; a late one says nothing."""

    def connect(self) -> None:
        """Let the engines send finished responses to the shards."""
        self._engines.connect_history(self._service.shards, timeout_s=ANSWER_TIMEOUT_S)

    def prefetch(self, running: Homes, upcoming: Sequence[Homes]) -> None:
        """Publish the newest history of upcoming groups beside their engines, in order; keep that of running groups."""
        self._order([running], upcoming)

    def place(self, homes: Sequence[Homes]) -> None:
        """Publish the history of these groups beside their engines, as far as it is missing, and remove all other."""
        self._order(homes, [])

    def started(self, group: PromptGroup, engine: int) -> None:
        """An engine has begun a group. If the group was planned for another node, publish its history here, too."""
        key = prompt_key(group.prompt.prompt_id)
        for node in self._nodes_of(engine):
            if key in self._ordered[node]:
                continue
            self._num_displaced += 1
            if node not in self._service.nodes:
                self._num_unread += 1
                continue
            self._ordered[node].add(key)
            self._service.add_segment(node, key)

    def _order(self, kept: Sequence[Homes], fresh: Sequence[Homes]) -> None:
        kept_keys, fresh_keys = self._keys(kept), self._keys(fresh)
        orders = {
            node: SegmentOrder(kept=kept_keys.get(node, ()), fresh=fresh_keys.get(node, ()))
            for node in self._service.nodes
        }
        self._ordered = defaultdict(set, {node: set(order.keys) for node, order in orders.items()})
        self._service.publish_segments(orders)

    def _keys(self, several: Sequence[Homes]) -> dict[str, tuple[int, ...]]:
        """By node, the different prompts of its engines' groups; the first groups of all engines come first."""
        keys: defaultdict[str, list[int]] = defaultdict(list)
        for homes in several:
            queues: defaultdict[str, list[list[int]]] = defaultdict(list)
            for engine, groups in homes.items():
                for node in self._nodes_of(engine):
                    queues[node].append([prompt_key(group.prompt.prompt_id) for group in groups])
            for node, of_node in queues.items():
                keys[node] += [key for key in chain.from_iterable(zip_longest(*of_node)) if key is not None]
        return {node: tuple(dict.fromkeys(found)) for node, found in keys.items()}

    def _nodes_of(self, engine: int) -> tuple[str, ...]:
        """The node of an engine; every node with a reader if it is unknown."""
        node = self._engines.node_of(engine)
        return (node,) if node else self._service.nodes

    def discard_drafts(self, *, keeps_requests: bool) -> None:
        """Reset the draft counters, so that drafts of an evaluation, or of an ended attempt, do not count for a step.

        With `keeps_requests` the next step counts the training requests that have started; an evaluation's never count.
        Drafts of training requests in an evaluation are discarded with the evaluation's: a forward holds both.
        """
        self._engines.reset_draft_stats(keeps_requests=keeps_requests)

    def record_rewards(self, groups: Sequence[ScoredGroup]) -> None:
        """Send the rewards of a batch's groups; the engines have already sent the tokens.

        A visit has the step for which its group was admitted, which may be an earlier one than that of the batch. A
        response that is left out, because its scoring failed, has no reward: NaN. So have the responses of the prompt's
        other groups in the step, unless they are in the batch.
        """
        rewards: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for scored in groups:
            of_visit = rewards[scored.group.step][prompt_key(scored.group.prompt.prompt_id)]
            first = scored.group.first_in_visit
            end = first + len(scored.rewards)
            of_visit += [math.nan] * (end - len(of_visit))
            of_visit[first:end] = (
                math.nan if scored.is_left_out(sample) else reward for sample, reward in enumerate(scored.rewards)
            )
        for step, of_step in sorted(rewards.items()):
            self._service.note_rewards(step, {key: tuple(of_visit) for key, of_visit in of_step.items()})

    def metrics(self) -> dict[str, float]:
        """Draft metrics since the last call or `discard_drafts`, and metrics of the history."""
        figures = self._engines.history_figures(timeout_s=ANSWER_TIMEOUT_S)
        self._lost_by_engine |= {number: num_lost for number, (_, num_lost) in figures.items()}
        report = self._service.report()
        return {
            **sum((drafted for drafted, _ in figures.values()), DraftStats()).metrics(),
            **self._state_metrics(report, sum(self._lost_by_engine.values())),
            **return_metrics(report.returns),
        }

    def _state_metrics(self, report: ServiceReport, num_lost_by_engines: int) -> dict[str, float]:
        num_lost_calls = report.num_lost_calls + num_lost_by_engines + self._num_unread
        num_displaced, self._num_displaced = self._num_displaced, 0
        metrics = {
            "history/bytes": float(report.stats.num_bytes),
            "history/prompts": float(report.stats.num_prompts),
            "history/segment_bytes": float(report.segment_bytes),
            "history/displaced_groups": float(num_displaced),
            # a restarted reader or shard counts from 0
            "history/built_segments": float(max(report.num_built - self._num_built, 0)),
            "history/evictions": float(max(report.stats.num_evictions - self._num_evictions, 0)),
            "history/left_out_segments": float(max(report.num_left_out - self._num_left_out, 0)),
            "history/lost_calls": float(max(num_lost_calls - self._num_lost_calls, 0)),
        }
        self._num_evictions, self._num_lost_calls = report.stats.num_evictions, num_lost_calls
        self._num_left_out = report.num_left_out
        self._num_built = report.num_built
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
