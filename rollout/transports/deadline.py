"""The limit of a publish in seconds in which this process ran: a suspended job blames no peer (decision 62)."""

import threading
import time
import weakref
from collections.abc import Callable

from history.patience import AwakeClock


class Deadline:
    """A limit that begins now.

    A thread reads its clock, also while the process packs or loads weights. The thread ends once the limit has passed,
    or nobody holds the deadline.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = AwakeClock(clock)
        self._lock = threading.Lock()
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="deadline", daemon=True).start()

    def is_over(self) -> bool:
        """Whether the limit has passed."""
        with self._lock:
            return self._clock() >= self._limit_s


def _watch(held: "weakref.ref[Deadline]") -> None:
    while (deadline := held()) is not None and not deadline.is_over():
        del deadline
        time.sleep(AwakeClock.READ_EVERY_S)
