"""What waits for which engine, and who takes what next: the part of the pool that decides.

A group that waits has a home, the engine for which it was planned. An engine takes what waits for it, older steps
first; if work is shared, it takes the longest that waits for another rather than begin a younger step, so that
no engine runs ahead while a batch is being waited for.

Invariants (`check_integrity`): a group waits at most once; what was taken does not wait; the expected tokens of an
engine are those of what waits for it and of what it runs.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.plan import EngineLoad, GroupForecast, RolloutPlan
from rollout.types import GroupId

_Key = tuple[int, int]
"""(step, place in the plan): what is smaller is taken first."""


def free_slots_for(group_size: int, num_slots: int) -> int:
    """How many of an engine's slots have to be free before it is given a group of that size: half of it.

    With fewer, most of the group would wait for slots here while another engine may have them; with more, slots stay
    empty.
    """
    return min(max(group_size // 2, 1), num_slots)


@dataclass(slots=True)
class Dispatcher:
    """Queues of all engines. `admit`, `take` and `finish` mutate."""

    num_engines: int
    _homes: list[list[tuple[_Key, int, GroupForecast]]] = field(init=False)
    _all: list[tuple[int, float, int, GroupForecast]] = field(default_factory=list)
    """(step, -expected tokens, arrival, group) of everything that may be shared; what was taken is skipped."""
    _waiting: dict[GroupId, int] = field(default_factory=dict)
    """Home of each group that waits."""
    _running: dict[GroupId, tuple[int, GroupForecast]] = field(default_factory=dict)
    _tokens: list[float] = field(init=False)
    _arrivals: int = 0
    num_stolen: int = 0
    """Groups that ran elsewhere than planned."""

    def __post_init__(self) -> None:
        self._homes = [[] for _ in range(self.num_engines)]
        self._tokens = [0.0] * self.num_engines

    def __len__(self) -> int:
        return len(self._waiting)

    def queued_tokens(self) -> Sequence[float]:
        """[engine], expected tokens of what waits for it and of what it runs."""
        return tuple(self._tokens)

    def admit(self, plan: RolloutPlan) -> None:
        """Add a plan's groups behind what waits, by step."""
        for engine, queue in enumerate(plan.queues):
            for group in queue:
                assert group.group_id not in self._waiting, f"group {group.group_id} was admitted twice"
                self._arrivals += 1
                self._waiting[group.group_id] = engine
                self._tokens[engine] += group.work
                heapq.heappush(self._homes[engine], ((group.step, self._arrivals), self._arrivals, group))
                if plan.shares_work:
                    heapq.heappush(self._all, (group.step, -group.tokens, self._arrivals, group))

    def peek(self, engine: int) -> GroupForecast | None:
        """What the engine would start next; None: nothing for it."""
        home, everything = self._homes[engine], self._all
        while home and self._waiting.get(home[0][2].group_id) != engine:
            heapq.heappop(home)
        while everything and everything[0][3].group_id not in self._waiting:
            heapq.heappop(everything)
        if home and not (everything and everything[0][0] < home[0][2].step):
            return home[0][2]
        return everything[0][3] if everything else None

    def take(self, engine: int) -> GroupForecast | None:
        """`peek`, and the engine has it from now on."""
        group = self.peek(engine)
        if group is None:
            return None
        planned = self._waiting.pop(group.group_id)
        if planned != engine:
            self.num_stolen += 1
            self._tokens[planned] -= group.work
            self._tokens[engine] += group.work
        self._running[group.group_id] = (engine, group)
        return group

    def finish(self, group_id: GroupId) -> None:
        """A running group has ended."""
        engine, group = self._running.pop(group_id)
        self._tokens[engine] -= group.work

    def loads(self, num_slots: int) -> list[EngineLoad]:
        """All engines as planning sees them."""
        return [EngineLoad(num_slots=num_slots, queued_tokens=max(tokens, 0.0)) for tokens in self._tokens]

    def check_integrity(self) -> None:
        """Assert the invariants."""
        assert not self._waiting.keys() & self._running.keys(), "a group waits and runs"
        for group_id, engine in self._waiting.items():
            found = sum(item[2].group_id == group_id for item in self._homes[engine])
            assert found == 1, f"group {group_id} waits {found} times"
