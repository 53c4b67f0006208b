"""The time for which a job was stopped with all its processes, as SLURM suspends one (decision 62).

Nothing tells a process that it was stopped. It notices that it looks at the clock later than it should.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from history.patience import LOOK_S, STOPPED_S

_log = logging.getLogger(__name__)


class Suspension:
    """Seconds for which this process was stopped while it was `watched`. Any thread may call it; all methods mutate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_s: float | None = None
        """When somebody has looked at the clock; None while nobody watches."""
        self._stopped_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the body, a thread looks at the clock every `LOOK_S`."""
        ends = threading.Event()
        thread = threading.Thread(target=self._look, args=(ends,), name="suspension", daemon=True)
        self._looked_s = self._clock()
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()
            self._looked_s = None

    def _look(self, ends: threading.Event) -> None:
        while not ends.wait(LOOK_S):
            self.seconds()

    def seconds(self) -> float:
        """Of all stops until now, also of one that the thread has not noticed yet."""
        with self._lock:
            now_s = self._clock()
            if self._looked_s is None:
                return self._stopped_s
            beyond_s, self._looked_s = now_s - self._looked_s - LOOK_S, now_s
            if beyond_s > STOPPED_S:
                self._stopped_s += beyond_s
                _log.warning("the controller was stopped for %.0f s, perhaps with the whole job; it goes on", beyond_s)
            return self._stopped_s
