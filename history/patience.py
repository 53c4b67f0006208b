"""Limits of time for a process that may be stopped itself: by SIGSTOP, or together with its container.

While it is stopped, clocks go on, and answers lie unread. So a wait consists of short looks, and the time beyond a look
does not count: whoever is waited for is not judged by time in which nobody waited (decision 46). `Patience` is for one
wait, `AwakeClock` for many at a time. A job that SLURM suspends stops with all its processes, so those that are waited
for may have been stopped, too.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

Answer = TypeVar("Answer")

NEVER = timedelta(days=30)
"""Limit for waits of libraries, whose clocks go on while this process is stopped. Our own looks end such waits."""
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


class AwakeClock:
    """Seconds of this process without those in which it was stopped.

    It has to be read every `READ_EVERY_S`, or at least once in `pause_s`. A longer pause between readings was a stop,
    and counts as `READ_EVERY_S`.
    """

    READ_EVERY_S = 0.25
    PAUSE_S = 2.0

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, pause_s: float = PAUSE_S) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._read_s = clock()
        self._awake_s = 0.0

    def __call__(self) -> float:
        """Seconds since the clock was made; mutates."""
        now = self._clock()
        passed_s = now - self._read_s
        self._awake_s += passed_s if passed_s <= self._pause_s else self.READ_EVERY_S
        self._read_s = now
        return self._awake_s


async def answer_within(limit_s: float, call: Awaitable[Answer]) -> Answer:
    """The answer of a call, which is cancelled if it is late by an `AwakeClock`.

    Raises:
        TimeoutError: the limit has passed.
    """
    calling, clock = asyncio.ensure_future(call), AwakeClock()
    try:
        while not (await asyncio.wait([calling], timeout=min(limit_s, AwakeClock.READ_EVERY_S)))[0]:
            if clock() >= limit_s:
                raise TimeoutError
        return calling.result()
    finally:
        calling.cancel()
