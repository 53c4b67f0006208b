"""Whether a running group should go on elsewhere: the rule by which an engine with nothing to do is given work.

A forward of an engine costs what it costs for everything that runs there (`rollout.tracing.engine_speed`). A group
whose engine is full can end sooner on one that is empty, though keys and values of all that it has must be computed
again there:

    saves_s = tokens still to come * (forward here - forward there) - forward that computes its context again

and it moves if that is more than `MIN_GAIN` of the price. The group that saves most moves first. The longer a response
has become the longer it is expected to go on, so it is outliers that move (RhymeRL, section 4.2, where a response
moves once it is longer than its tier).

Pure. The pool asks when an engine has nothing to do and nothing waits.

`Moves`: how a running group comes to go on elsewhere, one at a time; the pool's part of it, without any call.

    an engine has nothing to do          `whom_to_ask`: the engine with the most groups is asked what it runs
    it has answered                      `choose`: one of its groups is to be aborted there
    the group comes back, unfinished     `came_back`: it waits for the idle engine alone, with what it has

Invariants: at most one engine is asked at a time and at most one group moves; after an answer that led to nothing
nobody is asked until a group has come back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
class Mover:
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


@dataclass(slots=True)
class Moves:
    """All methods but `whom_to_ask` mutate."""

    mover: Mover | None = None
    """Decides which group moves; None: all stay where they are."""
    num_moved: int = 0
    """Groups that went on elsewhere, ever."""
    asked: int | None = None
    """The engine whose answer is waited for."""
    _leaving: tuple[GroupId, int] | None = None
    """The group that moves, and to which engine."""
    _is_settled: bool = False
    """The last answer led to nothing, and no group has come back since."""

    def whom_to_ask(self, num_groups: Mapping[int, int], idle: int | None) -> int | None:
        """The engine that might give something away; None: nobody is to be asked now.

        Args:
            num_groups: that each engine which is there runs; those that run none may be left out.
            idle: an engine for which there is nothing to do.
        """
        if self.mover is None or self.asked is not None or self._leaving is not None or self._is_settled:
            return None
        if idle is None or not num_groups:
            return None
        busiest = max(num_groups, key=lambda engine: (num_groups[engine], -engine))
        return busiest if num_groups[busiest] > 1 else None

    def choose(self, running: Sequence[InFlight], idle: int | None) -> GroupId | None:
        """The engine that was asked runs `running`: the group that is to leave it for `idle`; None: all stay."""
        self.asked = None
        chosen = self.mover.choose(running) if self.mover is not None and idle is not None else None
        if chosen is None or idle is None:
            self._is_settled = True
            return None
        self._leaving = (chosen, idle)
        return chosen

    def came_back(self, group_id: GroupId) -> int | None:
        """The call of a group has ended, somehow; the engine that it was to move to."""
        self._is_settled = False
        if self._leaving is None or self._leaving[0] != group_id:
            return None
        (_, target), self._leaving = self._leaving, None
        return target
