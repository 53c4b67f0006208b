"""The limit of a publish in seconds in which this process ran: a suspended job blames no peer (decision 62)."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout.patience import AwakeClock


class Deadline:
    """A limit that begins now.

    A thread reads its clock, also while the process packs or loads weights. The thread ends once the limit has passed,
    or nobody holds the deadline.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = AwakeClock(clock)
        self._lock = threading.Lock()
        self._interrupts: list[Callable[[], None]] = []
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="deadline", daemon=True).start()

    def is_over(self) -> bool:
        """Whether the limit has passed."""
        with self._lock:
            return self._clock() >= self._limit_s

    @contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[bool]:
        """Call `interrupt` in another thread if the limit passes during the body.

        The value is False if the limit has passed before; then nothing interrupts the body.
        """
        with self._lock:
            may_wait = self._clock() < self._limit_s
            if may_wait:
                self._interrupts.append(interrupt)
        try:
            yield may_wait
        finally:
            with self._lock:
                if may_wait:
                    self._interrupts.remove(interrupt)

    def _look(self) -> bool:
        """Whether the limit has passed; all bodies are interrupted then."""
        with self._lock:
            if self._clock() < self._limit_s:
                return False
            for interrupt in self._interrupts:
                interrupt()
            return True


def _watch(held: "weakref.ref[Deadline]") -> None:
    while (deadline := held()) is not None and not deadline._look():
        del deadline
        time.sleep(AwakeClock.READ_EVERY_S)
