"""Placement, dispatch and admission: invariants on random inputs, and a run of all three with random engines."""

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.planning.admission import FixedBatches, FlexibleBatches, check_batches
from rollout.planning.dispatcher import Dispatcher
from rollout.planning.plan import EngineLoad, GroupForecast, RolloutPlan, check_plan, plan_first
from rollout.planning.policies import LENGTH_COST, POLICIES, plan
from rollout.types import GroupId
from tests.support.scored_groups import scored_group


def forecasts(lengths, *, step=0, first=0, num_responses=4) -> list[GroupForecast]:
    return [
        GroupForecast(group_id=GroupId(first + i), step=step, num_responses=num_responses, tokens=float(length))
        for i, length in enumerate(lengths)
    ]


LENGTHS = st.lists(st.integers(1, 32_768), min_size=1, max_size=60)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, later=LENGTHS, num_engines=st.integers(1, 9), queued=st.integers(0, 100_000))
def test_every_group_is_placed_on_exactly_one_engine(policy, lengths, later, num_engines, queued):
    groups = forecasts(lengths) + forecasts(later, step=1, first=len(lengths))
    engines = [
        EngineLoad(num_seats=8, queued_tokens=float(queued * (i % 2)), speed=1 + i % 3) for i in range(num_engines)
    ]
    made = plan(policy, groups, engines)
    check_plan(made, groups, engines)
    for queue in made.queues:
        steps = [group.step // made.steps_together for group in queue]
        assert steps == sorted(steps)


def test_groups_without_forecasts_go_before_every_step_and_over_all_engines():
    groups = [scored_group(number).group for number in range(10, 15)]
    first = plan_first(groups, num_engines=2)
    dispatcher = Dispatcher(2)
    dispatcher.admit(plan("lpt", forecasts([9] * 4), [EngineLoad(num_seats=8)] * 2))
    dispatcher.admit(first)
    check_plan(first, [forecast for queue in first.queues for forecast in queue], [EngineLoad(num_seats=8)] * 2)
    taken = [dispatcher.take(number % 2).group_id for number in range(9)]
    assert sorted(taken[:5]) == [10, 11, 12, 13, 14] and sorted(taken[5:]) == [0, 1, 2, 3]


def test_an_unknown_policy_is_refused_naming_the_known_ones():
    with pytest.raises(ValueError, match=r"`fastest` is not one of static, lpt, histopipe, adaptive, flexible"):
        plan("fastest", [], [EngineLoad(num_seats=1)])


@given(lengths=st.lists(st.integers(1, 1000), min_size=8, max_size=40))
def test_longest_first_is_within_four_thirds_of_the_optimum(lengths):
    engines = [EngineLoad(num_seats=1)] * 4
    made = plan("lpt", forecasts(lengths, num_responses=1), engines)
    loads = [sum(group.tokens for group in queue) for queue in made.queues]
    assert max(loads) <= 4 / 3 * max(sum(lengths) / 4, max(lengths)) + max(lengths) / 3


def test_a_busy_engine_gets_fewer_tokens():
    engines = [EngineLoad(num_seats=8, queued_tokens=30_000.0), EngineLoad(num_seats=8)]
    busy, idle = plan("adaptive", forecasts([1000] * 10, num_responses=4), engines).queues
    assert (len(busy), len(idle)) == (1, 9)


def test_rank_groups_have_equal_cost_and_reverse_with_every_step():
    engines = [EngineLoad(num_seats=8)] * 4
    lengths = [100 * (i + 1) for i in range(40)]
    even, odd = (plan("histopipe", forecasts(lengths, step=step), engines).queues for step in (0, 1))
    assert [[g.tokens for g in queue] for queue in even] == [[g.tokens for g in queue] for queue in reversed(odd)]
    ascending = [group.tokens for queue in odd for group in queue]
    assert ascending == sorted(ascending)
    costs = [sum(group.tokens**LENGTH_COST for group in queue) for queue in odd]
    assert max(costs) / min(costs) < 1.4
    assert len(odd[0]) > 3 * len(odd[-1])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_group_is_dispatched_once_and_loads_equal_the_groups_present(data):
    dispatcher, naive, running, closed, number = Dispatcher(3), {}, {}, set(), 0
    for _ in range(data.draw(st.integers(5, 60))):
        match data.draw(st.sampled_from(("admit", "take", "take", "finish", "again", "move", "close", "open"))):
            case "admit":
                new = forecasts(data.draw(st.lists(st.integers(1, 99), max_size=5)), step=number % 3, first=number)
                number += len(new)
                policy = data.draw(st.sampled_from(("lpt", "adaptive")))
                dispatcher.admit(plan(policy, new, dispatcher.loads(8)))
                naive |= {group.group_id: group for group in new}
            case "take":
                engine = data.draw(st.integers(0, 2))
                seen = dispatcher.peek(engine)
                group = dispatcher.take(engine)
                assert group is seen
                assert group is None or engine not in closed
                if group is not None:
                    assert naive.pop(group.group_id) is group
                    running[group.group_id] = group
            case "finish" if running:
                group_id = data.draw(st.sampled_from(sorted(running)))
                del running[group_id]
                dispatcher.finish(group_id)
            case "move" if running:
                group_id = data.draw(st.sampled_from(sorted(running)))
                naive[group_id] = running.pop(group_id)
                target = data.draw(st.integers(0, 2))
                dispatcher.requeue(group_id, at=target)
                if target not in closed:
                    others = {dispatcher.peek(engine) for engine in range(3) if engine != target}
                    assert naive[group_id] not in others
            case "again" if running:
                group_id = data.draw(st.sampled_from(sorted(running)))
                naive[group_id] = running.pop(group_id)
                dispatcher.requeue(group_id)
            case "close":
                closed.add(engine := data.draw(st.integers(0, 2)))
                dispatcher.close(engine)
            case "open":
                closed.discard(engine := data.draw(st.integers(0, 2)))
                dispatcher.open(engine)
        dispatcher.check_integrity()
        assert len(dispatcher) == len(naive)
        homes = dispatcher.homes()
        assert sorted(group_id for group_ids in homes.values() for group_id in group_ids) == sorted([*naive, *running])
        for group_ids in homes.values():
            waits = [group_id in naive for group_id in group_ids]
            assert waits == sorted(waits), "a waiting group comes before a running one"
        expected = sum(group.work for group in [*naive.values(), *running.values()])
        assert sum(dispatcher.queued_tokens()) == pytest.approx(expected)
    for engine in range(3):
        dispatcher.open(engine)
    rest = []
    while (group := next(filter(None, map(dispatcher.take, range(3))), None)) is not None:
        rest.append(group.group_id)
    assert sorted(rest) == sorted(naive)


def test_an_engine_helps_with_the_oldest_step_before_it_begins_a_younger_one():
    dispatcher = Dispatcher(2)
    old, young = forecasts([50, 40, 30, 20]), forecasts([90, 80], step=1, first=4)
    dispatcher.admit(plan("adaptive", old, dispatcher.loads(8)))
    dispatcher.admit(plan("adaptive", young, dispatcher.loads(8)))
    taken = [dispatcher.take(0) for _ in range(6)]
    assert [group.group_id for group in taken] == [0, 3, 1, 2, 4, 5]
    assert dispatcher.take(0) is None and dispatcher.take(1) is None
    assert dispatcher.num_stolen == 3


def test_the_groups_of_an_engine_are_listed_in_the_order_of_starting():
    dispatcher = Dispatcher(2)
    dispatcher.admit(plan("lpt", forecasts([5, 9, 7, 3, 8, 1]), dispatcher.loads(8)))
    homes = dispatcher.homes()
    taken = {engine: [dispatcher.take(engine).group_id for _ in homes[engine]] for engine in (0, 1)}
    assert homes == taken == dispatcher.homes()


def test_an_engine_that_has_finished_all_groups_is_as_idle_as_one_that_never_had_any():
    """The sum of many works and its reverse leave a rounding error, by which a plan would order the engines."""
    dispatcher = Dispatcher(2)
    groups = [replace(group, tokens=group.tokens / 30) for group in forecasts(range(1, 9), num_responses=1)]
    dispatcher.admit(RolloutPlan(queues=(tuple(groups), ()), shares_work=False))
    while (group := dispatcher.take(0)) is not None:
        dispatcher.finish(group.group_id)
    assert dispatcher.queued_tokens()[0] != 0.0
    assert [load.queued_tokens for load in dispatcher.loads(8)] == [0.0, 0.0]


def test_without_sharing_an_engine_gets_only_its_planned_groups():
    dispatcher = Dispatcher(2)
    dispatcher.admit(plan("static", forecasts([5, 5, 5]), dispatcher.loads(8)))
    assert [dispatcher.take(1).group_id, dispatcher.take(1)] == [1, None]


def run(admission, *, policy, num_steps, groups_per_step, num_engines, seed):
    """A run of engines with one seat each, whose groups take random times; returns (batches, versions of starts)."""
    clock, generator = 0.0, random.Random(seed)
    dispatcher = Dispatcher(num_engines)
    ends, started, batches, version, trained_at = [], {}, [], 0, None
    idle = set(range(num_engines))

    def feed():
        for engine in sorted(idle):
            group = dispatcher.take(engine)
            if group is not None:
                idle.discard(engine)
                started[group.group_id] = version
                admission.started(group.group_id, version)
                heapq.heappush(ends, (clock + group.tokens * generator.uniform(0.3, 3), engine, group.group_id))

    dispatcher.admit(plan(policy, admission.due(0), dispatcher.loads(1)))
    while len(batches) < num_steps:
        feed()
        if trained_at is None:
            done, wanted = admission.progress(version)
            batch = admission.batch(version)
            assert (done < wanted) == (batch is None), "a stop request is looked for while groups are missing"
            if batch is not None:
                batches.append(batch)
                trained_at = clock + generator.uniform(0, 200)
        if trained_at is not None and (not ends or trained_at <= ends[0][0]):
            clock, trained_at, version = trained_at, None, version + 1
            dispatcher.admit(plan(policy, admission.due(version), dispatcher.loads(1)))
        elif ends:
            clock, engine, group_id = heapq.heappop(ends)
            idle.add(engine)
            dispatcher.finish(group_id)
            admission.completed(group_id)
            done, wanted = admission.progress(version) if trained_at is None else (0, groups_per_step)
            assert 0 <= done <= wanted <= groups_per_step
    return batches, started


def draw_of(num_groups, seed):
    def draw(step):
        generator = random.Random(1000 * seed + step)
        lengths = [int(generator.lognormvariate(3, 1)) + 1 for _ in range(num_groups)]
        return forecasts(lengths, step=step, first=step * num_groups)

    return draw


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(("static", "lpt", "histopipe", "adaptive")),
    overlap=st.integers(0, 3),
    head_start=st.sampled_from((0.0, 0.3)),
    groups=st.integers(1, 7),
    engines=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_fixed_batches_equal_the_drawn_steps_within_the_staleness_bound(
    policy, overlap, head_start, groups, engines, seed
):
    admission = FixedBatches(draw=draw_of(groups, seed), num_steps=9, overlap=overlap, head_start=head_start)
    batches, started = run(
        admission, policy=policy, num_steps=9, groups_per_step=groups, num_engines=engines, seed=seed
    )
    check_batches(batches, started, groups_per_step=groups, max_staleness=overlap + (head_start > 0))
    assert batches == [list(range(step * groups, (step + 1) * groups)) for step in range(9)]


@settings(max_examples=100, deadline=None)
@given(
    overlap=st.integers(0, 3),
    more=st.integers(0, 2),
    groups=st.integers(1, 7),
    engines=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_flexible_batches_hold_every_group_once_within_the_staleness_bound(overlap, more, groups, engines, seed):
    admission = FlexibleBatches(
        draw=draw_of(groups, seed), num_steps=9, groups_per_step=groups, overlap=overlap, max_staleness=overlap + more
    )
    batches, started = run(
        admission, policy="flexible", num_steps=9, groups_per_step=groups, num_engines=engines, seed=seed
    )
    check_batches(batches, started, groups_per_step=groups, max_staleness=overlap + more)


def with_changing_overlap(kind, most):
    """Admission whose overlap changes with every version, as the guard may change it."""

    class Changing(kind):
        def due(self, version):
            self.overlap = random.Random(version).randint(0, most)
            return super().due(version)

    return Changing


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from((FixedBatches, FlexibleBatches)),
    overlap=st.integers(1, 3),
    groups=st.integers(1, 7),
    engines=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_an_overlap_that_changes_from_step_to_step_breaks_no_invariant(kind, overlap, groups, engines, seed):
    flexible = {"groups_per_step": groups, "max_staleness": overlap} if kind is FlexibleBatches else {}
    admission = with_changing_overlap(kind, overlap)(
        draw=draw_of(groups, seed), num_steps=9, overlap=overlap, **flexible
    )
    policy = "flexible" if flexible else "adaptive"
    batches, started = run(
        admission, policy=policy, num_steps=9, groups_per_step=groups, num_engines=engines, seed=seed
    )
    check_batches(batches, started, groups_per_step=groups, max_staleness=overlap)


def test_a_flexible_batch_waits_for_a_group_that_would_become_too_stale():
    admission = FlexibleBatches(draw=draw_of(2, 0), num_steps=9, groups_per_step=2, overlap=1, max_staleness=1)
    first = [group.group_id for group in admission.due(0)]
    for group_id in first:
        admission.started(group_id, 0)
    for group_id in first[1:3]:
        admission.completed(group_id)
    assert admission.batch(0) == [1, 2]
    for group in admission.due(1):
        admission.started(group.group_id, 1)
        admission.completed(group.group_id)
    assert admission.batch(1) is None  # groups 0 and 3 started under version 0
    assert admission.progress(1) == (1, 2), "two others are complete, but the batch waits"
    assert admission.num_waits == 1
    admission.completed(GroupId(0))
    assert admission.batch(1) is None and admission.progress(1) == (1, 2)
    admission.completed(GroupId(3))
    assert admission.progress(1) == (2, 2)
    assert admission.batch(1) == [0, 3]
    assert admission.num_waits == 1


def test_only_groups_expected_to_be_longest_get_a_head_start():
    admission = FixedBatches(
        draw=lambda step: forecasts([5, 50, 7, 60], step=step, first=4 * step), num_steps=3, head_start=0.5
    )
    assert [group.group_id for group in admission.due(0)] == [0, 1, 2, 3, 5, 7]
    assert admission.num_ahead == 6
    admission.head_start = 0.0
    for group_id in range(4):
        admission.completed(GroupId(group_id))
    assert admission.batch(0) == [0, 1, 2, 3]
    assert admission.num_ahead == 2
    assert [group.group_id for group in admission.due(1)] == [4, 6]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    st.integers(2, 6),
    st.data(),
    st.sampled_from(("static", "lpt", "histopipe", "adaptive", "flexible")),
)
def test_engines_reserved_for_the_longest_groups_get_no_more_than_their_share(lengths, num_engines, data, policy):
    engines = [EngineLoad(num_seats=8)] * num_engines
    tail = data.draw(st.integers(1, num_engines - 1))
    groups = forecasts(lengths)
    found = plan(policy, groups, engines, tail_engines=tail)
    check_plan(found, groups, engines)
    first = num_engines - tail
    others, longest = (
        [g for queue in queues for g in queue] for queues in (found.queues[:first], found.queues[first:])
    )
    assert not longest or not others or min(g.tokens for g in longest) >= max(g.tokens for g in others)
    cost = sum(g.tokens**LENGTH_COST for g in groups)
    assert sum(g.tokens**LENGTH_COST for g in longest) <= cost * tail / num_engines * (1 + 1e-9)


def test_reserving_every_engine_for_the_longest_groups_is_refused():
    with pytest.raises(ValueError, match="2 engines for the longest groups leave none of 2"):
        plan("lpt", forecasts([1]), [EngineLoad(num_seats=8)] * 2, tail_engines=2)
