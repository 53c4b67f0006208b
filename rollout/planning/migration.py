"""Whether a running group should go on elsewhere: the rule by which an engine with nothing to do is given work.

A forward of an engine costs what it costs for everything that runs there (`rollout.tracing.engine_speed`). A group
whose engine is full can end sooner on one that is empty, though keys and values of all that it has must be computed
again there:

    saves_s = tokens still to come * (forward here - forward there) - forward that computes its context again

and it moves if that is more than `MIN_GAIN` of the price. The group that saves most moves first. The longer a response
has become the longer it is expected to go on, so it is outliers that move (RhymeRL, section 4.2, where a response
moves once it is longer than its tier).

Pure. The pool asks when an engine has nothing to do and nothing waits.

`GroupMigration`: how a running group comes to go on elsewhere, one at a time; the pool's part of it, without any call.

    an engine has nothing to do          `donor`: the engine with the most groups is asked what it runs
    it has answered                      `answered`: one of its groups is to be aborted there
    it has died instead                  `lost`: nobody is asked any more
    the call of a group has ended        `returned`: unfinished, it waits for the idle engine alone, with what it has

Invariants: at most one engine is asked at a time and at most one group moves; after an answer that led to nothing
nobody is asked until a group has come back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollout.tracing.engine_speed import EngineSpeed
from rollout.types import GroupId

MIN_GAIN = 1.0
"""What a move has to save, in prices of the move: forecasts of what is still to come are wrong by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A group that an engine runs."""

    group_id: GroupId
    num_prompt_tokens: int
    emitted: tuple[int, ...]
    """Tokens of each response that has not ended."""

    @property
    def num_context_tokens(self) -> int:
        """Of all of its running responses: what would have to be computed again elsewhere."""
        return len(self.emitted) * self.num_prompt_tokens + sum(self.emitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRule:
    """Decides which group an empty engine takes over."""

    remaining: Callable[[GroupId, int], float]
    """Expected tokens still to come of a response of the group that has emitted so many."""
    speed: Callable[[], EngineSpeed | None]
    """What forwards cost; None while nobody knows, and nothing moves."""

    def choose(self, running: Sequence[InFlight]) -> GroupId | None:
        """The group that leaves an engine which runs `running`, for one that runs nothing; None: all stay."""
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
    """Seconds of a forward in which every response of these groups gains a token."""
    tokens = sum(len(group.emitted) for group in running)
    return speed.fixed_s + speed.token_s * tokens + speed.context_s * sum(g.num_context_tokens for g in running)


class GroupChooser(Protocol):
    """Says which of an engine's groups goes on elsewhere; `MigrationRule` in a run."""

    def choose(self, running: Sequence[InFlight]) -> GroupId | None:
        """The group that leaves an engine which runs `running`, for one that runs nothing; None: all stay."""
        ...


@dataclass(slots=True, kw_only=True)
class GroupMigration:
    """All methods mutate."""

    rule: GroupChooser | None = None
    """None: all groups stay where they are."""
    num_moved: int = field(default=0, init=False)
    """Groups that went on elsewhere, ever."""
    _asked: int | None = field(default=None, init=False)
    """The engine whose answer is waited for."""
    _leaving: tuple[GroupId, int] | None = field(default=None, init=False)
    """The group that moves, and to which engine."""
    _is_settled: bool = field(default=False, init=False)
    """The last answer led to nothing, and no group has come back since."""

    def donor(self, num_groups: Mapping[int, int], idle: int | None) -> int | None:
        """The engine that has to be asked now what it runs; None: nobody is to be asked.

        Args:
            num_groups: that each engine which is there runs; those that run none may be left out.
            idle: an engine for which there is nothing to do.
        """
        if self.rule is None or self._asked is not None or self._leaving is not None or self._is_settled:
            return None
        if idle is None or not num_groups:
            return None
        busiest = max(num_groups, key=lambda engine: (num_groups[engine], -engine))
        self._asked = busiest if num_groups[busiest] > 1 else None
        return self._asked

    def answered(self, running: Sequence[InFlight], idle: int | None) -> GroupId | None:
        """The engine that was asked runs `running`: the group that is to leave it for `idle`; None: all stay."""
        self._asked = None
        chosen = self.rule.choose(running) if self.rule is not None and idle is not None else None
        if chosen is None or idle is None:
            self._is_settled = True
            return None
        self._leaving = (chosen, idle)
        return chosen

    def lost(self, engine: int) -> bool:
        """An engine has died; whether it was the one whose answer is waited for, which is over then."""
        if engine != self._asked:
            return False
        self._asked = None
        return True

    def returned(self, group_id: GroupId, *, resumable: bool) -> int | None:
        """The call of a group has ended on an engine that lives, with responses that could go on, or otherwise.

        Returns the engine at which the group goes on because it moves; None for any other group.
        """
        self._is_settled = False
        if self._leaving is None or self._leaving[0] != group_id:
            return None
        (_, target), self._leaving = self._leaving, None
        if not resumable:
            return None
        self.num_moved += 1
        return target
