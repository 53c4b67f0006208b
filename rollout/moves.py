"""How a running group comes to go on elsewhere, one at a time; the pool's part of it, without any call.

    an engine has nothing to do          `whom_to_ask`: the engine with the most groups is asked what it runs
    it has answered                      `choose`: one of its groups is to be aborted there (`rollout.migration`)
    the group comes back, unfinished     `came_back`: it waits for the idle engine alone, with what it has

Invariants: at most one engine is asked at a time and at most one group moves; after an answer that led to nothing
nobody is asked until a group has come back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.migration import InFlight, Mover
from rollout.types import GroupId


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
