"""History metrics of a step: sums over engines and differences of counters; unknown metrics are left out."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from history.drafting.stats import DraftStats
from history.lengths.book import LengthBook
from history.store.prompt_store import PromptStore, Return, StoreStats
from history.store.service import ServiceReport
from history.types import PastResponse, SegmentOrder, prompt_key
from rollout.config import PlannerConfig
from rollout.data.order import PromptOrder, PromptSet
from rollout.planning.planner import Planner
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.pool.history_client import HistoryClient, return_metrics
from rollout.processes import ProcessId
from rollout.tracing.draft_savings import seconds_saved
from rollout.tracing.forwards import FORWARD
from rollout.types import Score, ScoreStatus
from tests.support.pool_stress import SIZE, SLOTS, Engine, World, replace_ray
from tests.support.scored_groups import scored_group, scorer_answer


class Engines:
    def history_figures(self, *, timeout_s):
        return {0: (DraftStats(num_rows=10, num_emitted=20), 1), 1: (DraftStats(num_rows=10, num_emitted=40), 2)}

    def node_of(self, number):
        return "aabb "[number].strip()


class Service:
    nodes = ("a", "b")

    def __init__(self) -> None:
        self.calls = []
        self.lost = 5
        self.evictions = 7
        self.left_out = 2
        self.built = 4
        self.added = []
        self.published = {node: set() for node in self.nodes}

    def publish_segments(self, orders):
        self.calls.append(("publish_segments", orders))
        self.published = {node: set(order.keys) for node, order in orders.items()}

    def add_segment(self, node, key):
        self.added.append((node, key))
        self.published[node].add(key)

    def note_rewards(self, step, rewards):
        self.calls.append(("rewards", step, rewards))

    def report(self):
        stats = StoreStats(num_bytes=100, num_prompts=3, num_evictions=self.evictions)
        return ServiceReport(
            stats=stats,
            num_segments=2,
            segment_bytes=64,
            num_left_out=self.left_out,
            num_built=self.built,
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
    assert first["history/built_segments"] == 4.0
    service.lost, service.left_out, service.built = service.lost + 1, service.left_out + 3, 6
    second = client.metrics()
    assert (second["history/lost_calls"], second["history/evictions"]) == (1.0, 0.0)
    assert second["history/left_out_segments"] == 3.0
    assert second["history/built_segments"] == 2.0
    service.evictions = 2  # the shard was started again
    assert client.metrics()["history/evictions"] == 0.0


def test_calls_that_a_late_engine_has_lost_before_are_not_counted_again():
    engines = Engines()
    client = HistoryClient(Service(), engines)
    assert client.metrics()["history/lost_calls"] == 8.0
    answers = engines.history_figures(timeout_s=1)
    engines.history_figures = lambda *, timeout_s: {0: answers[0]}
    late = client.metrics()
    assert (late["history/lost_calls"], late["history/tokens_per_forward"]) == (0.0, 2.0)
    engines.history_figures = lambda *, timeout_s: answers
    assert client.metrics()["history/lost_calls"] == 0.0


GROUPS = [scored_group(number).group for number in range(6)]
KEYS = [prompt_key(group.prompt.prompt_id) for group in GROUPS]


def test_rewards_are_sent_by_prompt_key_for_the_step_under_which_engines_sent_the_tokens():
    service, groups = Service(), [scored_group(number) for number in range(3)]
    late = replace(groups[2], group=replace(groups[2].group, step=4))
    HistoryClient(service, Engines()).record_rewards([late, *groups[:2]])
    assert service.calls == [
        ("rewards", 0, {KEYS[0]: groups[0].rewards, KEYS[1]: groups[1].rewards}),
        ("rewards", 4, {KEYS[2]: late.rewards}),
    ]


def test_a_response_whose_scoring_failed_has_no_reward_in_the_history():
    """The substitute 0 would count as a reward below or above the others, and move their mean."""
    service, group = Service(), scored_group(0, num_samples=3)
    failed = Score(reward=0.0, status=ScoreStatus.TIMEOUT, is_left_out=True)
    substitute = Score(reward=-1.0, status=ScoreStatus.TIMEOUT)
    scores = (failed, Score(reward=5.0, status=ScoreStatus.OK), substitute)
    rewards = tuple(score.reward for score in scores)
    HistoryClient(service, Engines()).record_rewards([replace(group, rewards=rewards, scores=scores)])
    ((_, _, of_step),) = service.calls
    store = PromptStore(budget_bytes=1 << 20, kept_steps=1, reuse_share=lambda before, now: 0.0)
    for step in range(2):
        store.append(KEYS[0], [PastResponse(token_ids=np.arange(3), step=step, sample=n) for n in range(3)])
        store.note_rewards(KEYS[0], step, of_step[KEYS[0]])
    _, responses = store.fetch([KEYS[0]])[KEYS[0]]
    assert [response.step for response in responses] == [1, 1, 1]  # the visit is complete, so it has replaced step 0
    assert [response.reward for response in responses] == [pytest.approx(math.nan, nan_ok=True), 5.0, -1.0]


@pytest.mark.parametrize("batches", [[(0, 1)], [(1, 0)], [(0,), (1,)], [(1,), (0,)]])
def test_a_prompt_that_was_drawn_twice_in_a_step_keeps_the_rewards_of_both_groups(batches):
    first = scored_group(0)
    groups = [first, replace(first, group=replace(first.group, occurrence=1), rewards=(5.0, 6.0, 7.0, 8.0))]
    store = PromptStore(budget_bytes=1 << 20, kept_steps=1, reuse_share=lambda before, now: 0.0)
    store.append(KEYS[0], [PastResponse(token_ids=np.arange(3), step=0, sample=n) for n in range(4)])
    store.note_rewards(KEYS[0], 0, [0.0] * 4)
    store.append(KEYS[0], [PastResponse(token_ids=np.arange(3) + n, step=1, sample=n) for n in range(8)])
    for batch in batches:
        service = Service()
        of_step_1 = [replace(groups[number], group=replace(groups[number].group, step=1)) for number in batch]
        HistoryClient(service, Engines()).record_rewards(of_step_1)
        ((_, step, rewards),) = service.calls
        store.note_rewards(KEYS[0], step, rewards[KEYS[0]])
    _, responses = store.fetch([KEYS[0]])[KEYS[0]]
    assert [(response.step, response.sample, response.reward) for response in responses] == [
        (1, number, reward) for number, reward in enumerate((*first.rewards, 5.0, 6.0, 7.0, 8.0))
    ]
    store.check_integrity()


def test_each_node_is_sent_the_prompts_of_its_engines_in_the_order_of_starting():
    service = Service()
    client = HistoryClient(service, Engines())
    client.prefetch({2: [GROUPS[5]]}, [{0: GROUPS[:3], 1: [GROUPS[3], GROUPS[0]], 2: [GROUPS[4]]}, {1: [GROUPS[5]]}])
    (_, orders), *_ = service.calls
    assert orders == {
        "a": SegmentOrder(fresh=(KEYS[0], KEYS[3], KEYS[1], KEYS[2], KEYS[5])),
        "b": SegmentOrder(kept=(KEYS[5],), fresh=(KEYS[4],)),
    }
    client.place([{2: [GROUPS[5]], 3: [GROUPS[1]]}])
    assert service.calls[1][1] == {"a": SegmentOrder(), "b": SegmentOrder(kept=(KEYS[5], KEYS[1]))}


def test_an_engine_whose_node_is_unknown_finds_its_segments_everywhere():
    service = Service()
    HistoryClient(service, Engines()).place([{4: GROUPS[:1]}])
    assert service.calls[0][1] == dict.fromkeys("ab", SegmentOrder(kept=(KEYS[0],)))


def test_a_group_that_begins_on_another_node_is_counted_once_and_its_segment_is_built_there():
    service = Service()
    client = HistoryClient(service, Engines())
    client.place([{0: GROUPS[:1]}])
    client.started(GROUPS[0], 1)  # another engine of its node
    assert service.added == []
    client.started(GROUPS[0], 2)
    client.started(GROUPS[0], 3)
    assert service.added == [("b", KEYS[0])]
    assert client.metrics()["history/displaced_groups"] == 1.0
    service.nodes = ("a",)
    lost = client.metrics()["history/lost_calls"]
    client.started(GROUPS[1], 2)
    metrics = client.metrics()
    assert (lost, metrics["history/lost_calls"], metrics["history/displaced_groups"]) == (0.0, 1.0, 1.0)
    assert service.added == [("b", KEYS[0])]


NUM_STEPS, PER_STEP = 6, 20


class Calm(World):
    """Engines on two nodes that end responses at random and never die."""

    def happen(self):
        busy = [engine for engine in self.engines.actors if engine.running]
        if self.scores and (not busy or self.generator.random() < 0.1):
            ref, _ = self.scores.pop()
            ref.is_ready, ref.value = True, scorer_answer([Score(reward=1.0, status=ScoreStatus.OK)] * SIZE)
        else:
            self.generator.choice(busy).end_one()


def random_planner(**config) -> Planner:
    prompts = {f"t/{number}": replace(GROUPS[0].prompt, prompt_id=f"t/{number}") for number in range(3 * PER_STEP)}
    return Planner(
        PromptOrder([PromptSet(prompt_ids=tuple(prompts))], seed=3),
        prompts,
        config=PlannerConfig(**config),
        lengths=LengthBook(),
        num_steps=NUM_STEPS,
        prompts_per_step=PER_STEP,
        group_size=SIZE,
        sampling=GROUPS[0].sampling,
        seed=5,
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "config",
    [
        {"policy": "lpt"},
        {"policy": "adaptive"},
        {"policy": "lpt", "overlap": 1, "max_staleness": 1},
        {"policy": "flexible", "overlap": 1, "max_staleness": 1},
    ],
)
def test_a_reader_is_asked_for_the_prompts_that_its_engines_sample(monkeypatch, config, seed):
    """The real planner, pool and client over engines of two nodes that end responses at random.

    With sampling ahead, groups run while the segments of the next ones are ordered, and keep theirs.
    """
    world, service, began, step_orders, num_kept = Calm(random.Random(seed)), Service(), [], [], 0
    replace_ray(monkeypatch, world)
    engines = world.engines = EngineGroup([Engine(world) for _ in range(4)], num_ranks=1)
    engines._processes = {number: ProcessId(node_id=node, pid=1, start_ticks=0) for number, node in enumerate("aabb")}
    client, planner = HistoryClient(service, engines), random_planner(**config)

    def on_start(group, engine):
        client.started(group, engine)
        began.append(place_of(engine, group))
        assert_published([began[-1]])

    def place_of(engine, group):
        return engines.node_of(engine), prompt_key(group.prompt.prompt_id)

    def assert_published(places):
        """Each prompt has its segment on the node of the engine that samples it."""
        assert [(node, key) for node, key in places if key not in service.published[node]] == []

    pool = EnginePool(engines, [world.scorer], seats_per_engine=SLOTS, batches=planner, on_start=on_start)
    for step in range(NUM_STEPS):
        upcoming = planner.upcoming(step, pool.loads())
        client.prefetch(pool.homes(), [pool.planned(upcoming.groups, upcoming.plan)])
        in_flight = {place_of(engine, group) for engine, groups in pool.homes().items() for group in groups}
        assert_published(in_flight)
        due = planner.due(step, pool.loads())
        client.place([pool.homes(), pool.planned(due.groups, due.plan)])
        assert_published(in_flight)
        num_published = sum(map(len, service.published.values()))
        assert num_published <= len(in_flight) + len(due.groups), "a reader builds for engines of other nodes"
        num_kept += len(in_flight)
        pool.admit(due.groups, due.plan)
        planner.consumed(pool.take_batch(step))
        step_orders.append([{node: order.keys for node, order in call[1].items()} for call in service.calls])
        service.calls.clear()
    assert len(began) == NUM_STEPS * PER_STEP
    num_displaced = client._num_displaced
    assert num_displaced == len(service.added)
    assert num_displaced == 0 if config["policy"] == "lpt" else num_displaced <= pool._dispatcher.num_stolen
    if config.get("overlap"):
        assert num_kept > 0, "no group ran while segments were ordered"
        return
    assert num_kept == 0
    for step, (prefetched, placed) in enumerate(step_orders):
        assert prefetched == placed, "the trainer's time was used for other segments than those needed"
        assert sum(map(len, placed.values())) == PER_STEP  # of both nodes; twice as many if each reader built all
        needed = set(began[step * PER_STEP : (step + 1) * PER_STEP])
        assert needed - {(node, key) for node, keys in placed.items() for key in keys} <= set(service.added)


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
    return np.array([(began, 4, 0, 4, 0, seconds) for began, seconds in rows], dtype=FORWARD)


def test_measured_saving_compares_with_the_baseline_engines_token_rate():
    drafting, stock = (
        replace(one, summary=replace(one.summary, engine_id=number, lengths=lengths, started_at_s=10, finished_at_s=20))
        for number, (one, lengths) in enumerate([(scored_group(0), (30, 30)), (scored_group(1), (10, 10))])
    )
    traced = [forwards((9.0, 99.0), (11.0, 1.0), (12.0, 1.0)), forwards((11.0, 2.0), (25.0, 99.0))]
    # stock: 2 s for 20 tokens; 60 tokens would have taken 6 s, and took 2
    since_start = [-math.inf, -math.inf]
    assert seconds_saved(traced, [drafting, stock], {1}, earlier_s=since_start) == pytest.approx(4.0)
    assert math.isnan(seconds_saved(traced, [drafting], {1}, earlier_s=since_start))
    # both engines were idle when the step began; then the forwards of engine 0 are missing
    assert seconds_saved(traced, [drafting, stock], {1}, earlier_s=[8.0, 9.9]) == pytest.approx(4.0)
    assert math.isnan(seconds_saved([traced[0][:0], traced[1]], [drafting, stock], {1}, earlier_s=since_start))


def test_no_saving_is_measured_for_groups_that_began_before_the_forwards_of_the_step():
    """Both groups began in the step before: their tokens are all counted, and only half of their forwards are here."""
    drafting, stock = (
        replace(one, summary=replace(one.summary, engine_id=number, lengths=(9, 9), started_at_s=10, finished_at_s=60))
        for number, one in enumerate([scored_group(0), scored_group(1)])
    )
    traced = [forwards((50.0, 1.0), (51.0, 1.0)), forwards((50.5, 2.0))]
    for earlier_s in ([49.0, 49.5], [49.0, 9.0], [9.0, 49.5], [9.0, 10.0]):
        assert math.isnan(seconds_saved(traced, [drafting, stock], {1}, earlier_s=earlier_s))
