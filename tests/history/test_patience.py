"""A limit of time for a process that may be stopped itself; over a clock of the test."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from history.patience import LOOK_S, AwakeClock, Patience, answer_within


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def looks(patience: Patience, clock: Clock, *, stopped_in: dict[int, float] | None = None, most: int = 100) -> int:
    """Looks until the limit has passed; during some of them this process is stopped for so many seconds."""
    for number in range(most):
        clock.now += patience.look_s() + (stopped_in or {}).get(number, 0.0)
        if patience.is_over():
            return number + 1
    raise AssertionError("the limit never passes")


def test_a_limit_is_spent_in_short_looks() -> None:
    clock = Clock()
    assert looks(Patience(4 * LOOK_S + 1.0, clock), clock) == 5
    assert clock.now == 4 * LOOK_S + 1.0
    assert looks(Patience(0.5, clock), clock) == 1


def test_time_in_which_the_waiting_process_was_stopped_does_not_count() -> None:
    clock = Clock()
    assert looks(Patience(4 * LOOK_S, clock), clock, stopped_in={1: 3600.0}) == 4
    assert clock.now == 4 * LOOK_S + 3600.0


def test_after_a_stop_in_the_last_look_there_is_another_one() -> None:
    clock = Clock()
    assert looks(Patience(2 * LOOK_S, clock), clock, stopped_in={1: 3600.0}) == 3


def test_the_awake_clock_leaves_out_the_time_in_which_its_process_was_stopped() -> None:
    clock = Clock(100.0)
    awake = AwakeClock(clock)
    readings = []
    for passed_s in (0.25, 1.5, 3600.0, 0.25, 2.5, 0.0):
        clock.now += passed_s
        readings.append(awake())
    assert readings == [0.25, 1.75, 2.0, 2.25, 2.5, 2.5]


async def steady(answer: str, *, seconds: float) -> str:
    """An answer after some time of work, of which a stop takes nothing away."""
    for _ in range(round(seconds / 0.01)):
        await asyncio.sleep(0.01)
    return answer


def test_a_stop_does_not_make_an_awaited_answer_late() -> None:
    async def stopped() -> str:
        asyncio.get_running_loop().call_later(0.1, time.sleep, 3.5)  # the event loop is late, as after a stop
        return await answer_within(3.0, steady("answer", seconds=0.4))

    assert asyncio.run(stopped()) == "answer"


def test_a_late_answer_is_cancelled_and_an_error_is_raised() -> None:
    async def late() -> None:
        call = asyncio.ensure_future(asyncio.Event().wait())
        with pytest.raises(TimeoutError):
            await answer_within(0.05, call)
        await asyncio.sleep(0)
        assert call.cancelled()

    async def fails() -> None:
        raise RuntimeError("no memory")

    asyncio.run(late())
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(answer_within(5.0, fails()))
