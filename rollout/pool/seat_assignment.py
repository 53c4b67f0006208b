"""Decides which engines start which groups now: the emptiest engine first, until no engine has room. No Ray.

The pool decides after every call that ends, so a heap finds the emptiest engine: a search through all engines for every
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
    emptiest = [(seats.used(engine), engine) for engine in engines]
    heapq.heapify(emptiest)
    starts: list[tuple[int, GroupForecast]] = []
    full: dict[int, int] = {}
    while emptiest:
        _, engine = emptiest[0]
        forecast = dispatcher.peek(engine)
        needed = 0 if forecast is None else free_seats_for(forecast.num_responses, seats.seats_per_engine)
        if forecast is None or seats.free(engine) < needed:
            heapq.heappop(emptiest)
            if forecast is not None:
                full[engine] = seats.num_ended_for(engine, needed)
            continue
        dispatcher.take(engine)
        seats.begin(engine, forecast.num_responses)
        starts.append((engine, forecast))
        heapq.heapreplace(emptiest, (seats.used(engine), engine))
    return SeatAssignment(starts=starts, full=full)
