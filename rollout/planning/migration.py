"""Migration of a running group from a full engine to an idle one: the rule and its state. Pure, without calls.

The cost of a forward depends on all requests of its engine (`rollout.tracing.engine_speed`). A group of a full engine
can end sooner on an empty one, although the keys and values of its tokens must be recomputed there:

    saves_s = tokens still to come * (forward here - forward there) - forward that recomputes the context

A group moves if it saves more than `MIN_GAIN` times that last forward. The group that saves most moves first. The
longer a response already is, the longer it is expected to continue, so outliers move. (RhymeRL, section 4.2: a response
moves once it is longer than its tier.)

The pool asks when an engine is idle and no group waits. `GroupMigration` follows one migration at a time:

    an engine is idle                  `donor`: the engine with the most groups is asked for its running groups
    the donor has answered             `answered`: one of its groups is to be aborted
    the donor has died                 `lost`: the question is void
    the call of a group has ended      `returned`: unfinished, the group waits for the idle engine only, with its tokens

Invariants: at most one engine is asked at a time, and at most one group moves. After an answer without a migration, no
engine is asked until a group has returned.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollout.tracing.engine_speed import EngineSpeed
from rollout.types import GroupId

MIN_GAIN = 1.0
"""Least saving of a migration, as a multiple of its price; forecasts of remaining tokens have errors of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A running group of an engine."""

    group_id: GroupId
    num_prompt_tokens: int
    emitted: tuple[int, ...]
    """Tokens of each response that has not ended."""

    @property
    def num_context_tokens(self) -> int:
        """Of all running responses: the tokens that another engine would recompute."""
        return len(self.emitted) * self.num_prompt_tokens + sum(self.emitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRule:
    """Chooses the group that an empty engine takes over."""

    remaining: Callable[[GroupId, int], float]
    """Expected remaining tokens of a response of a group, from the number of its emitted tokens."""
    speed: Callable[[], EngineSpeed | None]
    """Cost of forwards; None while it is unknown, and then no group moves."""

    def choose(self, running: Sequence[InFlight]) -> GroupId | None:
        """The group that moves from an engine with `running` to an empty engine; None if all stay."""
        speed = self.speed()
        if speed is None:
            return None
        here_s = _forward_s(speed, running)
        best: GroupId | None = None
        most_s = 0.0
        for group in running:
            if not group.emitted:
                continue
            left = max(self.remaining(group.group_id, emitted) for emitted in group.emitted)
            price_s = speed.fixed_s + speed.token_s * group.num_context_tokens
            saves_s = left * (here_s - _forward_s(speed, [group])) - price_s
            if saves_s > max(most_s, MIN_GAIN * price_s):
                best, most_s = group.group_id, saves_s
        return best


def _forward_s(speed: EngineSpeed, running: Sequence[InFlight]) -> float:
    """Seconds of a forward in which each response of these groups gains one token."""
    tokens = sum(len(group.emitted) for group in running)
    return speed.fixed_s + speed.token_s * tokens + speed.context_s * sum(g.num_context_tokens for g in running)


class GroupChooser(Protocol):
    """Chooses the group of an engine that migrates; `MigrationRule` in a run."""

    def choose(self, running: Sequence[InFlight]) -> GroupId | None:
        """The group that moves from an engine with `running` to an empty engine; None if all stay."""
        ...


@dataclass(slots=True, kw_only=True)
class GroupMigration:
    """State of the current migration. All methods mutate."""

    rule: GroupChooser | None = None
    """None: no group migrates."""
    num_moved: int = field(default=0, init=False)
    """Groups that have migrated since the start."""
    _asked: int | None = field(default=None, init=False)
    """The engine whose answer is pending."""
    _leaving: tuple[GroupId, int] | None = field(default=None, init=False)
    """The migrating group and its target engine."""
    _is_settled: bool = field(default=False, init=False)
    """The last answer led to no migration, and no group has returned since."""

    def donor(self, num_groups: Mapping[int, int], idle: int | None) -> int | None:
        """The engine to ask for its running groups now; None if no engine is to be asked.

        Args:
            num_groups: running groups of each engine that is alive; engines without any may be left out.
            idle: an engine without work.
        """
        if self.rule is None or self._asked is not None or self._leaving is not None or self._is_settled:
            return None
        if idle is None or not num_groups:
            return None
        busiest = max(num_groups, key=lambda engine: (num_groups[engine], -engine))
        self._asked = busiest if num_groups[busiest] > 1 else None
        return self._asked

    def answered(self, running: Sequence[InFlight], idle: int | None) -> GroupId | None:
        """The donor runs `running`: the group that moves to `idle`; None if all stay."""
        self._asked = None
        chosen = self.rule.choose(running) if self.rule is not None and idle is not None else None
        if chosen is None or idle is None:
            self._is_settled = True
            return None
        self._leaving = (chosen, idle)
        return chosen

    def lost(self, engine: int) -> bool:
        """An engine has died. Returns whether its answer was pending; the question is void then."""
        if engine != self._asked:
            return False
        self._asked = None
        return True

    def returned(self, group_id: GroupId, *, resumable: bool) -> int | None:
        """The call of a group has ended; `resumable`: it has unfinished responses, and its engine is alive.

        Returns the engine to which the group migrates; None for any other group.
        """
        self._is_settled = False
        if self._leaving is None or self._leaving[0] != group_id:
            return None
        (_, target), self._leaving = self._leaving, None
        if not resumable:
            return None
        self.num_moved += 1
        return target
