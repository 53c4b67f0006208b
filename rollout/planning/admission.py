"""Decides when a group may start and which groups form a batch; the two decisions bound staleness.

A group that starts under policy version v and is trained on at version u has staleness u - v. No group is admitted that
could become too stale, so none has to be dropped for its age.

Fixed batches: the batch of step t is the groups drawn for t. Version v admits the groups of all steps up to
v + overlap. Of the next step it admits the share `head_start` with the longest expected responses. The staleness of a
group is at most overlap + (1 if head_start).

Flexible batches: a batch is R complete groups, earliest start first. At most (overlap + 1) * R groups are admitted and
not yet trained on. A group that started under v must be in batch v + max_staleness at the latest. This is possible if
at most (d - u + 1) * R groups are due by d, for every d, when batch u is formed (Hall's condition). A batch that would
break the condition for later batches is delayed. When a group starts under u, at most (overlap + 1) * R groups are due
by u + max_staleness; therefore the bound must not be below the overlap.

Invariants (`check_batches`, asserted in every test): every group is admitted once and is in one batch; a batch has R
groups, until fewer are left; no group exceeds `max_staleness`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

from rollout.planning.plan import GroupForecast
from rollout.types import GroupId

Draw = Callable[[int], Sequence[GroupForecast]]
"""The groups drawn for a step. Steps come in order; one may come again, with the same groups."""


class Admission(Protocol):
    """Decides which groups may start and which are trained on. All methods but `upcoming` mutate."""

    def upcoming(self, version: int) -> list[GroupForecast]:
        """The groups that `due` would admit; nothing is admitted."""
        ...

    def due(self, version: int) -> list[GroupForecast]:
        """The groups that may start now that `version` has been published."""
        ...

    def started(self, group_id: GroupId, version: int) -> None:
        """An engine has begun a group under a version."""
        ...

    def completed(self, group_id: GroupId) -> None:
        """A group can be trained on."""
        ...

    def batch(self, version: int) -> list[GroupId] | None:
        """The groups of batch `version`, in order of admission; None while the batch is incomplete."""
        ...

    def progress(self, version: int) -> tuple[int, int]:
        """(complete groups, groups of batch `version`); the first is smaller while `batch` returns None"""
        ...

    @property
    def num_ahead(self) -> int:
        """Groups that are admitted and in no batch yet."""
        ...


@dataclass(slots=True, kw_only=True)
class _Step:
    """The groups drawn for one step."""

    groups: list[GroupForecast]
    admitted: set[GroupId] = field(default_factory=set)
    num_missing: int


@dataclass(slots=True, kw_only=True)
class FixedBatches:
    """The batch of step t is the groups drawn for t."""

    draw: Draw
    num_steps: int
    overlap: int = 0
    head_start: float = 0.0
    """Share of groups that start one more step ahead, 0..1."""
    _steps: dict[int, _Step] = field(default_factory=dict)
    _step_of: dict[GroupId, int] = field(default_factory=dict)

    def due(self, version: int) -> list[GroupForecast]:
        """Whole steps up to `overlap` ahead, and the longest expected groups of one more step."""
        admitted = self.upcoming(version)
        for group in admitted:
            self._steps[self._step_of[group.group_id]].admitted.add(group.group_id)
        return admitted

    def upcoming(self, version: int) -> list[GroupForecast]:
        """The groups that `due` would admit; draws their steps."""
        found: list[GroupForecast] = []
        for step in range(version, min(version + self.overlap + 1, self.num_steps)):
            found += self._new(step, 1.0)
        ahead = version + self.overlap + 1
        if self.head_start > 0 and ahead < self.num_steps:
            found += self._new(ahead, self.head_start)
        return found

    def started(self, group_id: GroupId, version: int) -> None:
        """No effect: a fixed batch does not depend on start versions."""

    def completed(self, group_id: GroupId) -> None:
        """Count a complete group."""
        self._steps[self._step_of.pop(group_id)].num_missing -= 1

    def batch(self, version: int) -> list[GroupId] | None:
        """All groups drawn for this step; None while some are incomplete."""
        step = self._steps[version]
        if step.num_missing:
            return None
        del self._steps[version]
        return [group.group_id for group in step.groups]

    def progress(self, version: int) -> tuple[int, int]:
        """(complete groups, groups) of this step."""
        step = self._steps[version]
        return len(step.groups) - step.num_missing, len(step.groups)

    @property
    def num_ahead(self) -> int:
        """Groups that are admitted and in no batch yet; those that `upcoming` has drawn do not count."""
        return sum(len(step.admitted) for step in self._steps.values())

    def _new(self, number: int, share: float) -> list[GroupForecast]:
        """The groups of a step's longest `share` that are not admitted."""
        if number not in self._steps:
            groups = list(self.draw(number))
            self._steps[number] = _Step(groups=groups, num_missing=len(groups))
            self._step_of.update((group.group_id, number) for group in groups)
        step = self._steps[number]
        longest = sorted(step.groups, key=lambda group: (-group.tokens, group.group_id))
        new = [g for g in longest[: round(share * len(longest))] if g.group_id not in step.admitted]
        return sorted(new, key=lambda group: group.group_id)


@dataclass(slots=True, kw_only=True)
class _Deadline:
    """Groups that started under one version and are not trained on yet."""

    num_open: int = 0
    """Incomplete groups."""
    complete: deque[GroupId] = field(default_factory=deque)
    """In the order of completion."""


@dataclass(slots=True, kw_only=True)
class FlexibleBatches:
    """A batch is the first complete groups, unless another group would become too stale."""

    draw: Draw
    num_steps: int
    groups_per_step: int
    overlap: int
    max_staleness: int
    first_step: InitVar[int] = 0
    num_waits: int = 0
    """Batches that had enough complete groups and were delayed because others would have become too stale."""
    _next_step: int = 0
    _num_outstanding: int = 0
    _started: dict[GroupId, int] = field(default_factory=dict)
    _by_start: dict[int, _Deadline] = field(default_factory=dict)
    """By start version, ascending."""
    _waits: bool = False

    def __post_init__(self, first_step: int) -> None:
        self._next_step = first_step

    def due(self, version: int) -> list[GroupForecast]:
        """The groups of further steps, until `overlap` steps are outstanding."""
        admitted, self._next_step = self._ahead()
        self._num_outstanding += len(admitted)
        return admitted

    def upcoming(self, version: int) -> list[GroupForecast]:
        """The groups that `due` would admit."""
        return self._ahead()[0]

    def started(self, group_id: GroupId, version: int) -> None:
        """Set a group's deadline, `max_staleness` later. A restart keeps it: tokens of the first start may remain."""
        if group_id in self._started:
            return
        self._started[group_id] = version
        self._by_start.setdefault(version, _Deadline()).num_open += 1

    def completed(self, group_id: GroupId) -> None:
        """A group may be in the next batch."""
        of_version = self._by_start[self._started.pop(group_id)]
        of_version.num_open -= 1
        of_version.complete.append(group_id)

    def batch(self, version: int) -> list[GroupId] | None:
        """The first complete groups by start version, if all others can still meet their deadlines; else None."""
        size = self._size
        if self._num_complete < size:
            return None
        if not self._leaves_room(version, size):
            self.num_waits += not self._waits
            self._waits = True
            return None
        chosen: list[GroupId] = []
        for started, groups in sorted(self._by_start.items()):
            while groups.complete and len(chosen) < size:
                chosen.append(groups.complete.popleft())
            if not groups.complete and not groups.num_open:
                del self._by_start[started]
        self._num_outstanding -= size
        self._waits = False
        return sorted(chosen)

    def progress(self, version: int) -> tuple[int, int]:
        """(complete groups, fewer than a batch while `batch` returns None; groups of the batch)"""
        size = self._size
        is_complete = self._num_complete >= size and self._leaves_room(version, size)
        return size if is_complete else min(self._num_complete, size - 1), size

    @property
    def num_ahead(self) -> int:
        """Groups that are admitted and in no batch yet."""
        return self._num_outstanding

    @property
    def _size(self) -> int:
        """Groups of the next batch."""
        return min(self.groups_per_step, self._num_outstanding)

    @property
    def _num_complete(self) -> int:
        return sum(len(groups.complete) for groups in self._by_start.values())

    def _ahead(self) -> tuple[list[GroupForecast], int]:
        """The groups of further steps until `overlap` steps are outstanding, and the first step after them."""
        step, groups = self._next_step, list[GroupForecast]()
        while step < self.num_steps and self._num_outstanding + len(groups) <= self.overlap * self.groups_per_step:
            groups += self.draw(step)
            step += 1
        return groups, step

    def _leaves_room(self, version: int, size: int) -> bool:
        """Whether all groups that remain after a batch of `size` can still meet their deadlines."""
        due = 0
        for started, groups in sorted(self._by_start.items()):
            taken = min(len(groups.complete), size)
            size -= taken
            due += groups.num_open + len(groups.complete) - taken
            if due > (started + self.max_staleness - version) * self.groups_per_step:
                return False
        return True


def check_batches(
    batches: Sequence[Sequence[GroupId]], started: Mapping[GroupId, int], *, groups_per_step: int, max_staleness: int
) -> None:
    """Assert the invariants of a run: `batches[u]` was trained on at version u, `started` has every admitted group."""
    seen = [group_id for batch in batches for group_id in batch]
    assert len(seen) == len(set(seen)), "a group was trained on twice"
    assert set(seen) == set(started), "a group was lost, or trained on without having started"
    assert all(len(batch) == groups_per_step for batch in batches[:-1]), "a batch has the wrong size"
    for version, batch in enumerate(batches):
        stale = max((version - started[group_id] for group_id in batch), default=0)
        assert stale <= max_staleness, f"batch {version} holds a group of staleness {stale}"
