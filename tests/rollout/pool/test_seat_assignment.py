"""The groups that engines start now: equal to a plain search through all engines, and quick for many engines."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.planning.dispatcher import Dispatcher, free_seats_for
from rollout.planning.plan import FIRST, EngineLoad, GroupForecast, RolloutPlan
from rollout.planning.policies import TOGETHER, plan
from rollout.pool.seat_assignment import assign_seats
from rollout.pool.seat_counts import SeatCounts
from rollout.types import GroupId

SEATS = 12


def by_search(dispatcher: Dispatcher, seats: SeatCounts, engines, runs) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Before every start, search all engines with room: for the oldest step, then for one with groups of its own.

    `runs`: by group, its step or run of steps.
    """
    starts, homes = [], dispatcher.homes()
    while True:
        able = []
        for engine in engines:
            forecast = dispatcher.peek(engine)
            if forecast is not None and seats.free(engine) >= free_seats_for(forecast.num_responses, SEATS):
                is_guest = forecast.step != FIRST and forecast.group_id not in homes.get(engine, ())
                able.append((runs[forecast.group_id], is_guest, seats.used(engine), engine))
        if not able:
            break
        *_, engine = min(able)
        forecast = dispatcher.take(engine)
        seats.begin(engine, forecast.num_responses)
        starts.append((engine, forecast.group_id))
    waiting = {engine: forecast for engine in engines if (forecast := dispatcher.peek(engine)) is not None}
    return starts, {
        engine: seats.num_ended_for(engine, free_seats_for(forecast.num_responses, SEATS))
        for engine, forecast in waiting.items()
    }


def planned(policy, groups, num_engines) -> RolloutPlan:
    """Groups of one step under a policy; `evaluation`: without one, as `plan_first` places them."""
    if policy != "evaluation":
        return plan(policy, groups, [EngineLoad(num_seats=SEATS)] * num_engines)
    queues = tuple(tuple(groups[number::num_engines]) for number in range(num_engines))
    return RolloutPlan(queues=queues, shares_work=True)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_choices_are_those_of_a_search_through_all_engines(data):
    num_engines = data.draw(st.integers(1, 9))
    dispatcher, seats, running = Dispatcher(num_engines), SeatCounts(num_engines, seats_per_engine=SEATS), {}
    number, runs = 0, {}
    for step in range(data.draw(st.integers(1, 6))):
        sizes = data.draw(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 40)), max_size=12))
        policy = data.draw(st.sampled_from(("static", "adaptive", "flexible", "evaluation")))
        of_step = FIRST if policy == "evaluation" else step
        groups = [
            GroupForecast(group_id=GroupId(number + i), step=of_step, num_responses=size, tokens=float(tokens))
            for i, (size, tokens) in enumerate(sizes)
        ]
        number += len(groups)
        runs |= {group.group_id: of_step // (TOGETHER if policy == "flexible" else 1) for group in groups}
        dispatcher.admit(planned(policy, groups, num_engines))
        lost = data.draw(st.sets(st.integers(0, num_engines - 1), max_size=num_engines - 1))
        for engine in range(num_engines):
            dispatcher.close(engine) if engine in lost else dispatcher.open(engine)
        alive = [engine for engine in range(num_engines) if engine not in lost]

        expected = by_search(copy.deepcopy(dispatcher), copy.deepcopy(seats), alive, runs)
        assigned = assign_seats(dispatcher, seats, alive)
        starts = [(engine, forecast.group_id) for engine, forecast in assigned.starts]
        assert (starts, dict(assigned.full)) == expected
        dispatcher.check_integrity()
        seats.check_integrity()

        running |= {forecast.group_id: (engine, forecast.num_responses) for engine, forecast in assigned.starts}
        for group_id in data.draw(st.sets(st.sampled_from(sorted(running)))) if running else ():
            engine, size = running.pop(group_id)
            match data.draw(st.sampled_from(("ends", "ends", "waits again", "moves"))):
                case "ends":
                    dispatcher.finish(group_id)
                case "waits again":
                    dispatcher.requeue(group_id)
                case "moves":
                    dispatcher.requeue(group_id, at=data.draw(st.integers(0, num_engines - 1)))
            seats.returned(engine, size)


def assigned_to(plans, *, seats: SeatCounts) -> tuple[Dispatcher, list[list[int]]]:
    """By engine, the groups that it starts of these plans."""
    num_engines = len(plans[0].queues)
    dispatcher = Dispatcher(num_engines)
    for one in plans:
        dispatcher.admit(one)
    started = [[] for _ in range(num_engines)]
    for engine, forecast in assign_seats(dispatcher, seats, range(num_engines)).starts:
        started[engine].append(forecast.group_id)
    return dispatcher, started


def singles(tokens, *, step=0, first=0) -> list[GroupForecast]:
    """Groups of one response."""
    return [
        GroupForecast(group_id=GroupId(first + i), step=step, num_responses=1, tokens=float(length))
        for i, length in enumerate(tokens)
    ]


def test_with_seats_for_all_groups_each_engine_starts_those_that_were_placed_on_it():
    """The engine with the long group is the emptiest one, and is left so."""
    placed = plan("adaptive", singles([100, *[10] * 5]), [EngineLoad(num_seats=8)] * 2)
    dispatcher, started = assigned_to([placed], seats=SeatCounts(2, seats_per_engine=8))
    assert started == [[0], [1, 2, 3, 4, 5]]
    assert dispatcher.num_stolen == 0


def test_an_engine_with_room_takes_the_groups_that_find_none_where_they_were_placed():
    placed = plan("adaptive", singles([100, *[10] * 5]), [EngineLoad(num_seats=3)] * 2)
    dispatcher, started = assigned_to([placed], seats=SeatCounts(2, seats_per_engine=3))
    assert started == [[0, 4, 5], [1, 2, 3]]
    assert dispatcher.num_stolen == 2


def test_an_older_step_that_finds_no_room_at_home_goes_before_a_younger_one_that_does():
    old, young = singles([5, 5, 5]), singles([9, 9], step=1, first=3)
    plans = [RolloutPlan(queues=queues, shares_work=True) for queues in (((), tuple(old)), (tuple(young), ()))]
    dispatcher, started = assigned_to(plans, seats=SeatCounts(2, seats_per_engine=2))
    assert started == [[2, 3], [0, 1]]
    assert [group.group_id for group in map(dispatcher.peek, range(2))] == [4, 4]


def test_the_emptiest_engine_takes_the_next_group_of_an_evaluation():
    seats = SeatCounts(2, seats_per_engine=8)
    seats.begin(0, 6)
    _, started = assigned_to([planned("evaluation", singles([9] * 4, step=FIRST), 2)], seats=seats)
    assert started == [[], [1, 3, 0, 2]]


@pytest.mark.parametrize("num_homes", [512, 1], ids=["placed on all engines", "placed on one engine"])
def test_no_engine_is_searched_for_through_all_others(num_homes):
    """The number of looks at seats and queues grows with engines and groups, not with their product."""

    class CountedSeats(SeatCounts):
        num_looks = 0

        def used(self, engine: int) -> int:
            self.num_looks += 1
            return super().used(engine)

    class CountedQueues(Dispatcher):
        num_looks = 0

        def rank(self, engine: int):
            self.num_looks += 1
            return super().rank(engine)

    num_engines, num_groups = 512, 1024
    groups = [
        GroupForecast(group_id=GroupId(number), step=0, num_responses=4, tokens=10.0) for number in range(num_groups)
    ]
    dispatcher, seats = CountedQueues(num_engines), CountedSeats(num_engines, seats_per_engine=SEATS)
    homes = plan("adaptive", groups, dispatcher.loads(SEATS)[:num_homes])
    dispatcher.admit(homes.over(range(num_homes), num_engines=num_engines))
    assigned = assign_seats(dispatcher, seats, range(num_engines))
    assert len(assigned.starts) == num_groups
    assert max(seats.num_looks, dispatcher.num_looks) <= 4 * (num_engines + num_groups)
