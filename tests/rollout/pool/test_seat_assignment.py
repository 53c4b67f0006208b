"""The groups that engines start now: equal to a plain search for the emptiest engine, and quick for many engines."""

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.planning.dispatcher import Dispatcher, free_seats_for
from rollout.planning.plan import EngineLoad, GroupForecast
from rollout.planning.policies import plan
from rollout.pool.seat_assignment import assign_seats
from rollout.pool.seat_counts import SeatCounts
from rollout.types import GroupId

SEATS = 12


def by_search(dispatcher: Dispatcher, seats: SeatCounts, engines) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Search all engines for the emptiest one before every start."""
    starts, full, candidates = [], {}, set(engines)
    while candidates:
        engine = min(candidates, key=lambda number: (seats.used(number), number))
        forecast = dispatcher.peek(engine)
        needed = 0 if forecast is None else free_seats_for(forecast.num_responses, SEATS)
        if forecast is None or seats.free(engine) < needed:
            candidates.discard(engine)
            if forecast is not None:
                full[engine] = seats.num_ended_for(engine, needed)
            continue
        dispatcher.take(engine)
        seats.begin(engine, forecast.num_responses)
        starts.append((engine, forecast.group_id))
    return starts, full


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_choices_are_those_of_a_search_through_all_engines(data):
    num_engines = data.draw(st.integers(1, 9))
    dispatcher, seats, running = Dispatcher(num_engines), SeatCounts(num_engines, seats_per_engine=SEATS), {}
    number = 0
    for step in range(data.draw(st.integers(1, 6))):
        sizes = data.draw(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 40)), max_size=12))
        groups = [
            GroupForecast(group_id=GroupId(number + i), step=step, num_responses=size, tokens=float(tokens))
            for i, (size, tokens) in enumerate(sizes)
        ]
        number += len(groups)
        policy = data.draw(st.sampled_from(("static", "adaptive", "flexible")))
        dispatcher.admit(plan(policy, groups, [EngineLoad(num_seats=SEATS)] * num_engines))
        lost = data.draw(st.sets(st.integers(0, num_engines - 1), max_size=num_engines - 1))
        for engine in range(num_engines):
            dispatcher.close(engine) if engine in lost else dispatcher.open(engine)
        alive = [engine for engine in range(num_engines) if engine not in lost]

        expected = by_search(copy.deepcopy(dispatcher), copy.deepcopy(seats), alive)
        assigned = assign_seats(dispatcher, seats, alive)
        starts = [(engine, forecast.group_id) for engine, forecast in assigned.starts]
        assert (starts, dict(assigned.full)) == expected
        dispatcher.check_integrity()
        seats.check_integrity()

        running |= {forecast.group_id: (engine, forecast.num_responses) for engine, forecast in assigned.starts}
        for group_id in data.draw(st.sets(st.sampled_from(sorted(running)))) if running else ():
            engine, size = running.pop(group_id)
            dispatcher.finish(group_id)
            seats.report(engine, seats.num_ended_for(engine, seats.free(engine) + size))


def test_no_engine_is_searched_for_through_all_others():
    """The number of looks at seats grows with engines and groups, not with their product."""

    class Counted(SeatCounts):
        num_looks = 0

        def used(self, engine: int) -> int:
            self.num_looks += 1
            return super().used(engine)

    num_engines, num_groups = 512, 1024
    groups = [
        GroupForecast(group_id=GroupId(number), step=0, num_responses=4, tokens=10.0) for number in range(num_groups)
    ]
    dispatcher, seats = Dispatcher(num_engines), Counted(num_engines, seats_per_engine=SEATS)
    dispatcher.admit(plan("adaptive", groups, dispatcher.loads(SEATS)))
    assigned = assign_seats(dispatcher, seats, range(num_engines))
    assert len(assigned.starts) == num_groups
    assert seats.num_looks <= 4 * (num_engines + num_groups)
