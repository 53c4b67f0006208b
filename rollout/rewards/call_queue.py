"""Calls of a reward function that wait for a worker, the oldest first."""

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout.rewards.call import RewardOutcome, RewardRequest


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call, from its submission to its outcome."""

    number: int
    """Ascending in the order of submission."""
    request: RewardRequest
    outcome: "asyncio.Future[RewardOutcome]"
    has_begun: bool = False
    """Whether the worker that has it now has received it."""
    num_tries: int = 0
    given_s: float = 0.0
    """When a worker got it, by the clock of `RewardWorkers`."""
    limit: asyncio.TimerHandle | None = None
    """Fires at its time limit; None before it is given to a worker."""

    def settle(self, outcome: RewardOutcome) -> None:
        """The call has ended."""
        self.stop_clock()
        if not self.outcome.done():  # else nobody waits for it any more
            self.outcome.set_result(outcome)

    def stop_clock(self) -> None:
        """No worker has the call any more."""
        if self.limit is not None:
            self.limit.cancel()


@dataclass(slots=True, kw_only=True)
class CallQueue:
    """Waiting calls. Those that may not share a worker go to the first one that has no call."""

    shared: list[tuple[int, Call]] = field(default_factory=list)
    """Heap by number."""
    alone: list[tuple[int, Call]] = field(default_factory=list)
    """The same for calls that may not share a worker."""

    def add(self, call: Call, *, alone: bool = False) -> None:
        """A call waits."""
        heapq.heappush(self.alone if alone else self.shared, (call.number, call))

    def oldest_is_alone(self) -> bool:
        """Whether the oldest of all waiting calls may not share a worker."""
        return bool(self.alone) and (not self.shared or self.alone[0][0] < self.shared[0][0])

    def take(self, *, num_running: int, most: int) -> tuple[Call, bool] | None:
        """The next call for a worker that runs `num_running` of at most so many, and whether it may not share it."""
        if self.alone and not num_running:
            return heapq.heappop(self.alone)[1], True
        if self.shared and num_running < most:
            return heapq.heappop(self.shared)[1], False
        return None

    def take_all(self) -> Iterator[Call]:
        """All calls; none waits afterwards."""
        for waiting in (self.alone, self.shared):
            while waiting:
                yield heapq.heappop(waiting)[1]
