"""History metrics of a step: sums over engines and differences of counters; unknown metrics are left out."""

import math

import numpy as np
import pytest

from history.drafting.stats import DraftStats
from history.store.prompt_store import Return, StoreStats
from history.store.service import ServiceReport
from history.types import prompt_key
from rollout.pool.history_client import HistoryClient, return_metrics
from rollout.tracing.draft_savings import seconds_saved
from rollout.tracing.forwards import FORWARD
from tests.support.scored_groups import scored_group


class Engines:
    def draft_stats(self, *, timeout_s):
        return {0: DraftStats(num_rows=10, num_emitted=20), 1: DraftStats(num_rows=10, num_emitted=40)}

    def lost_history_calls(self, *, timeout_s):
        return {0: 1, 1: 2}


class Service:
    def __init__(self) -> None:
        self.calls = []
        self.lost = 5
        self.evictions = 7
        self.left_out = 2

    def publish_segments(self, keys):
        self.calls.append(("publish_segments", keys))

    def note_rewards(self, step, rewards):
        self.calls.append(("rewards", step, rewards))

    def report(self):
        stats = StoreStats(num_bytes=100, num_prompts=3, num_evictions=self.evictions)
        return ServiceReport(
            stats=stats,
            num_segments=2,
            segment_bytes=64,
            num_left_out=self.left_out,
            num_lost_calls=self.lost,
            returns=(),
        )


def come_back(before: float, now: float, share: float = math.nan, tokens: int = 10) -> Return:
    return Return(mean_length_before=before, mean_length=now, num_tokens=tokens, reusable_share=share)


def test_metrics_sum_over_engines_and_count_each_lost_call_once():
    service = Service()
    client = HistoryClient(service, Engines())
    first = client.metrics()
    assert first["history/tokens_per_forward"] == 3.0
    assert (first["history/lost_calls"], first["history/evictions"]) == (8.0, 7.0)
    assert first["history/left_out_segments"] == 2.0
    service.lost += 1
    service.left_out += 3
    second = client.metrics()
    assert (second["history/lost_calls"], second["history/evictions"]) == (1.0, 0.0)
    assert second["history/left_out_segments"] == 3.0
    service.evictions = 2  # the shard was started again
    assert client.metrics()["history/evictions"] == 0.0


def test_prompts_and_rewards_are_sent_by_prompt_key():
    service, group = Service(), scored_group(0)
    client = HistoryClient(service, Engines())
    client.prefetch([group.group.prompt])
    client.record_rewards(4, [group])
    key = prompt_key(group.group.prompt.prompt_id)
    assert service.calls == [("publish_segments", [key]), ("rewards", 4, {key: group.rewards})]


def test_reuse_is_weighted_by_tokens_and_rank_correlation_needs_three_prompts():
    found = return_metrics([come_back(1, 2, 0.5, 10), come_back(2, 3, 1.0, 30), come_back(3, 9)])
    assert found == {
        "history/reusable_share": pytest.approx(0.875),
        "history/length_rank_correlation": pytest.approx(1.0),
    }
    assert return_metrics([come_back(1, 2), come_back(2, 1)]) == {}
    assert return_metrics([come_back(5, 1), come_back(5, 2), come_back(5, 3)]) == {}
    assert return_metrics([]) == {}


def forwards(*rows: tuple[float, float]):
    return np.array([(began, 4, 4, 0, seconds) for began, seconds in rows], dtype=FORWARD)


def test_measured_saving_compares_with_the_baseline_engines_token_rate():
    from dataclasses import replace

    drafting, stock = (
        replace(one, summary=replace(one.summary, engine_id=number, lengths=lengths, started_at_s=10, finished_at_s=20))
        for number, (one, lengths) in enumerate([(scored_group(0), (30, 30)), (scored_group(1), (10, 10))])
    )
    traced = [forwards((9.0, 99.0), (11.0, 1.0), (12.0, 1.0)), forwards((11.0, 2.0), (25.0, 99.0))]
    # stock: 2 s for 20 tokens; 60 tokens would have taken 6 s, and took 2
    assert seconds_saved(traced, [drafting, stock], {1}) == pytest.approx(4.0)
    assert math.isnan(seconds_saved(traced, [drafting], {1}))
