"""The log of forwards returns each of them once, with the bytes that numpy would write."""

from collections.abc import Callable

import numpy as np
import pytest

from rollout.tracing.forwards import FORWARD, NUM_RECENT, ForwardLog, ForwardRecord, decode_forwards


def record(number: int, seconds: Callable[[], float] | None = None) -> ForwardRecord:
    return ForwardRecord(
        started_at_s=1.7e9 + number / 3,
        num_running=65_535 - number,
        num_preempted=number % 7,
        num_scheduled_tokens=(1 << 30) + number,
        num_context_tokens=(1 << 40) + number,
        seconds=seconds or (lambda: number / 7),
    )


def rows(numbers: range) -> np.ndarray:
    """The same forwards, packed by numpy."""
    records = map(record, numbers)
    return np.array(
        [
            (
                one.started_at_s,
                one.num_running,
                one.num_preempted,
                one.num_scheduled_tokens,
                one.num_context_tokens,
                one.seconds(),
            )
            for one in records
        ],
        dtype=FORWARD,
    )


@pytest.mark.parametrize("num_forwards", [0, 3, 4, 5, 10])
def test_every_forward_is_drained_once_and_in_order(num_forwards: int) -> None:
    log = ForwardLog(num_recent=4)
    for begin in (0, 100):
        for number in range(begin, begin + num_forwards):
            log.append(record(number))
        assert log.drain() == rows(range(begin, begin + num_forwards)).tobytes()
    assert log.drain() == b""


def test_no_forward_of_a_long_step_is_lost() -> None:
    """A step of 8 waves of 32k tokens has as many forwards in each engine."""
    log, one = ForwardLog(), record(0)
    num_forwards = 8 << 15
    for _ in range(num_forwards + 1000):
        log.append(one)
    assert len(decode_forwards(log.drain())) == num_forwards + 1000


def test_the_newest_forwards_are_asked_for_their_seconds_only_when_they_are_drained() -> None:
    """The device may still run them: to ask would wait for it, within a forward."""
    asked: list[int] = []

    def of(number: int) -> ForwardRecord:
        return record(number, lambda: asked.append(number) or 0.5)

    log = ForwardLog()
    for number in range(NUM_RECENT + 3):
        log.append(of(number))
    assert asked == [0, 1, 2]
    assert (decode_forwards(log.drain())["seconds"] == 0.5).all()
    assert asked == list(range(NUM_RECENT + 3))
