"""Queues of all engines: which groups wait for which engine, and which group an engine starts next.

A waiting group has a home: the engine for which it was planned. An engine starts the groups of its home, older steps
first. If work is shared, it starts the longest group that waits for another engine before a group of a younger step.
Thus no engine runs ahead while the trainer waits for a batch. Where several engines have room, `rank` says which of
them starts first, so that a group leaves its home only if its home has no room.

Invariants (`check_integrity`): a group waits at most once; a running group does not wait. The expected tokens of an
engine are those of its waiting and its running groups.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.planning.plan import FIRST, EngineLoad, GroupForecast, RolloutPlan
from rollout.types import GroupId

_Entry = tuple[int, float, int, GroupForecast]
"""(step, or number of a run of steps with equal priority; rank within it; arrival; group). The smallest entry is
taken first. Only the newest arrival of a group counts."""


def free_seats_for(group_size: int, num_seats: int) -> int:
    """How many seats of an engine must be free before it is given a group of that size: half the group's size.

    With fewer, most of the group would wait here while another engine may have free seats. With more, seats stay empty.
    """
    return min(max(group_size // 2, 1), num_seats)


@dataclass(slots=True)
class Dispatcher:
    """Queues of all engines. `admit`, `take`, `finish`, `requeue`, `close` and `open` mutate."""

    num_engines: int
    num_stolen: int = 0
    """Groups that ran on another engine than planned."""
    _homes: list[list[_Entry]] = field(init=False)
    """By engine, in the order of the plan."""
    _shared: list[_Entry] = field(default_factory=list)
    """Groups that any engine may take, the longest first."""
    _waiting: dict[GroupId, tuple[int, int]] = field(default_factory=dict)
    """Home and arrival of each waiting group."""
    _running: dict[GroupId, tuple[int, GroupForecast]] = field(default_factory=dict)
    """Engine and forecast of each running group."""
    _shared_by: dict[GroupId, tuple[bool, int]] = field(default_factory=dict)
    """Of waiting and running groups: whether any engine may take them, and how many steps have equal priority."""
    _tokens: list[float] = field(init=False)
    _closed: set[int] = field(default_factory=set)
    """Lost engines."""
    _arrivals: int = 0

    def __post_init__(self) -> None:
        self._homes = [[] for _ in range(self.num_engines)]
        self._tokens = [0.0] * self.num_engines

    def __len__(self) -> int:
        return len(self._waiting)

    def queued_tokens(self) -> Sequence[float]:
        """[engine], expected tokens of its waiting and running groups."""
        return tuple(self._tokens)

    def loads(self, num_seats: int) -> list[EngineLoad]:
        """All engines as planning sees them. Tokens are whole: rounding errors of sums must not order idle engines."""
        return [EngineLoad(num_seats=num_seats, queued_tokens=float(max(round(tokens), 0))) for tokens in self._tokens]

    def homes(self) -> dict[int, list[GroupId]]:
        """By engine, the groups that it runs, and then those that wait for it, the next one first."""
        homes: dict[int, list[GroupId]] = {}
        for group_id, (engine, _) in self._running.items():
            homes.setdefault(engine, []).append(group_id)
        for engine, entries in enumerate(self._homes):
            for _, _, arrival, group in sorted(entries, key=lambda entry: entry[:3]):
                if self._waiting.get(group.group_id) == (engine, arrival):
                    homes.setdefault(engine, []).append(group.group_id)
        return homes

    def admit(self, plan: RolloutPlan) -> None:
        """Add a plan's groups behind the waiting groups, by step."""
        for engine, queue in enumerate(plan.queues):
            for group in queue:
                assert group.group_id not in self._waiting, f"group {group.group_id} was admitted twice"
                self._shared_by[group.group_id] = (plan.shares_work, plan.steps_together)
                self._wait(group, engine, rank=float(self._arrivals))

    def peek(self, engine: int) -> GroupForecast | None:
        """The group that the engine would start next; None if there is none."""
        found = self.rank(engine)
        return found[2] if found is not None else None

    def rank(self, engine: int) -> tuple[int, bool, GroupForecast] | None:
        """(step or run of steps, whether the group leaves its home, group) of `peek`; the smallest starts first.

        Groups that were planned without a forecast, as those of an evaluation, are at home everywhere.
        """
        if engine in self._closed:
            return None
        home, shared = self._first(self._homes[engine]), self._first(self._shared)
        leaves_home = home is None or (shared is not None and shared[0] < home[0])
        entry = shared if leaves_home else home
        if entry is None:
            return None
        return entry[0], leaves_home and entry[3].step != FIRST, entry[3]

    def home(self, group_id: GroupId) -> int:
        """The engine for which a waiting group waits."""
        return self._waiting[group_id][0]

    def take(self, engine: int) -> GroupForecast | None:
        """Return the group of `peek`; the engine runs it from now on."""
        group = self.peek(engine)
        if group is None:
            return None
        planned, _ = self._waiting.pop(group.group_id)
        self.num_stolen += planned != engine
        self._tokens[planned] -= group.work
        self._tokens[engine] += group.work
        self._running[group.group_id] = (engine, group)
        return group

    def finish(self, group_id: GroupId) -> None:
        """A running group has ended."""
        engine, group = self._running.pop(group_id)
        self._tokens[engine] -= group.work
        del self._shared_by[group_id]

    def requeue(self, group_id: GroupId, *, at: int | None = None) -> None:
        """Let an interrupted group wait again, before all others of its step; with `at`, for that engine only."""
        engine, group = self._running.pop(group_id)
        self._tokens[engine] -= group.work
        if at is not None:
            _, steps_together = self._shared_by[group_id]
            self._shared_by[group_id] = (False, steps_together)
        self._wait(group, engine if at is None else at, rank=-float("inf"))

    def close(self, engine: int) -> None:
        """An engine is lost: its waiting groups move to other engines."""
        self._closed.add(engine)
        entries, self._homes[engine] = self._homes[engine], []
        for _, rank, arrival, group in sorted(entries, key=lambda entry: entry[:3]):
            if self._waiting.get(group.group_id) == (engine, arrival):
                self._tokens[engine] -= group.work
                self._wait(group, engine, rank=rank)

    def open(self, engine: int) -> None:
        """An engine serves again."""
        self._closed.discard(engine)
        for lost in tuple(self._closed):  # groups that waited there while all engines were lost
            self.close(lost)

    def check_integrity(self) -> None:
        """Assert the invariants."""
        assert not self._waiting.keys() & self._running.keys(), "a group waits and runs"
        for group_id, (engine, arrival) in self._waiting.items():
            num_entries = sum(
                entry[2:] == (arrival, entry[3]) and entry[3].group_id == group_id for entry in self._homes[engine]
            )
            assert num_entries == 1, f"group {group_id} waits {num_entries} times"
            assert engine not in self._closed or len(self._closed) == self.num_engines, "a group waits at a lost engine"

    def _wait(self, group: GroupForecast, planned: int, *, rank: float) -> None:
        home = self._open_home(planned)
        self._arrivals += 1
        self._waiting[group.group_id] = (home, self._arrivals)
        self._tokens[home] += group.work
        is_shared, steps_together = self._shared_by[group.group_id]
        step = group.step // steps_together
        heapq.heappush(self._homes[home], (step, rank, self._arrivals, group))
        if is_shared:
            heapq.heappush(self._shared, (step, -group.tokens, self._arrivals, group))

    def _open_home(self, planned: int) -> int:
        """The planned engine; if it is lost and others are not, the engine with the least work."""
        if planned not in self._closed or len(self._closed) == self.num_engines:
            return planned
        others = (number for number in range(self.num_engines) if number not in self._closed)
        return min(others, key=lambda number: (self._tokens[number], number))

    def _first(self, heap: list[_Entry]) -> _Entry | None:
        """The first valid entry; outdated entries before it are dropped."""
        while heap and self._waiting.get(heap[0][3].group_id, (0, 0))[1] != heap[0][2]:
            heapq.heappop(heap)
        return heap[0] if heap else None
