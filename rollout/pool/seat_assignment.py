"""Decides which engines start which groups now. No Ray.

Groups of older steps start first. Within a step every engine starts the groups that were planned for it, while it has
room. Then engines that still have room take groups whose own engine has none, the emptiest engine first. So sharing
undoes no placement. The groups of an evaluation have no place, and the emptiest engine starts the next one.

The pool decides after every call that ends, so a heap finds the next engine: a search through all engines for every
group grows with the square of their number.

Invariant: the choices are those of the search (`tests/rollout/pool/test_seat_assignment.py`).
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollout.planning.dispatcher import Dispatcher, free_seats_for
from rollout.planning.plan import GroupForecast
from rollout.pool.seat_counts import SeatCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatAssignment:
    """What engines do with the seats that are free."""

    starts: Sequence[tuple[int, GroupForecast]]
    """Engine and group, in the order of starting."""
    full: Mapping[int, int]
    """Engines whose next group lacks seats, with the number of responses that must have ended before it starts."""


def assign_seats(dispatcher: Dispatcher, seats: SeatCounts, engines: Iterable[int]) -> SeatAssignment:
    """Take the next groups of `dispatcher` for `engines`, and count their seats as used."""
    starts: list[tuple[int, GroupForecast]] = []
    full: dict[int, int] = {}

    def lacks_seats(engine: int, forecast: GroupForecast) -> bool:
        needed = free_seats_for(forecast.num_responses, seats.seats_per_engine)
        if seats.free(engine) >= needed:
            return False
        full[engine] = seats.num_ended_for(engine, needed)
        return True

    queue: list[tuple[int, bool, int, int]] = []  # (step, whether the group leaves its home, used seats, engine)
    for engine in engines:
        found = dispatcher.rank(engine)
        if found is None:
            continue
        step, leaves_home, forecast = found
        if dispatcher.home(forecast.group_id) != engine or not lacks_seats(engine, forecast):
            queue.append((step, leaves_home, seats.used(engine), engine))
    heapq.heapify(queue)
    while queue:
        _, _, used, engine = queue[0]
        found = dispatcher.rank(engine)
        if found is None:
            heapq.heappop(queue)
            continue
        step, leaves_home, forecast = found
        if (step, leaves_home) != queue[0][:2]:  # another engine has taken what was next here
            heapq.heapreplace(queue, (step, leaves_home, used, engine))
            continue
        if lacks_seats(engine, forecast):
            heapq.heappop(queue)
            continue
        home = dispatcher.home(forecast.group_id)
        dispatcher.take(engine)
        seats.begin(engine, forecast.num_responses)
        starts.append((engine, forecast))
        heapq.heapreplace(queue, (step, leaves_home, seats.used(engine), engine))
        if full.pop(home, None) is not None:  # a smaller group may be next there
            heapq.heappush(queue, (step, False, seats.used(home), home))
    return SeatAssignment(starts=starts, full=full)
