"""The limit of a publish, over a clock of the test that jumps as after a stop."""

import threading
import time
import weakref

from rollout.transports.deadline import Deadline


class Clock:
    """The clock of the machine, which goes on while the process is stopped."""

    def __init__(self) -> None:
        self.stopped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.stopped_s


def test_a_wait_is_interrupted_when_the_limit_passes_and_not_before() -> None:
    interrupted = threading.Event()
    deadline = Deadline(0.6)
    with deadline.interrupting(interrupted.set) as may_wait:
        assert may_wait and not deadline.is_over()
        assert not interrupted.wait(0.3)
        assert interrupted.wait(20)
    assert deadline.is_over()
    with deadline.interrupting(interrupted.set) as may_wait:
        assert not may_wait


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    clock, interrupted = Clock(), threading.Event()
    deadline = Deadline(60.0, clock)
    with deadline.interrupting(interrupted.set):
        clock.stopped_s = 3600.0
        assert not interrupted.wait(0.6)
        assert not deadline.is_over()


def test_a_wait_that_has_ended_is_not_interrupted() -> None:
    interrupted = threading.Event()
    deadline = Deadline(0.3)
    with deadline.interrupting(interrupted.set):
        pass
    while not deadline.is_over():
        time.sleep(0.05)
    assert not interrupted.wait(0.4)


def test_time_between_two_waits_counts_although_nobody_asks() -> None:
    deadline = Deadline(2.5)
    time.sleep(3.0)
    assert deadline.is_over()


def test_a_deadline_that_nobody_holds_leaves_no_thread() -> None:
    before = threading.active_count()
    deadline = Deadline(3600.0)
    assert threading.active_count() == before + 1
    held = weakref.ref(deadline)
    del deadline
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() == before and held() is None
