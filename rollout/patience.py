"""Limits of time for a process that may be stopped itself: by SIGSTOP, or together with its container.

While it is stopped, clocks go on, and answers lie unread. So a wait consists of short looks, and the time beyond a look
does not count: whoever is waited for is not judged by time in which nobody waited (decision 46).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LOOK_S = 5.0
"""Longest look."""
STOPPED_S = 5.0
"""A look that takes so much longer than it should was interrupted: this process was stopped."""


@dataclass(slots=True)
class Patience:
    """What is left of a limit. Look for at most `look_s()`, then ask `is_over()`; both mutate."""

    left_s: float
    clock: Callable[[], float] = time.monotonic
    _look_s: float = field(default=0.0, init=False)
    _began_s: float = field(default=0.0, init=False)

    def look_s(self, most_s: float = LOOK_S) -> float:
        """Length of the look that begins now."""
        self._look_s, self._began_s = min(self.left_s, most_s), self.clock()
        return self._look_s

    def is_over(self) -> bool:
        """Whether the limit has passed with this look.

        A look counts as long as it was meant to be. After a stop there is always another one, because answers may have
        come meanwhile.
        """
        passed_s = self.clock() - self._began_s
        self.left_s -= self._look_s
        if passed_s > self._look_s + STOPPED_S:
            self.left_s = max(self.left_s, LOOK_S)
        return self.left_s <= 0
