"""Tells whether the process of an actor still runs, apart from whether its work comes forward.

A call of such an actor may take minutes for good reasons: a slow disk, a slow reward function. A process that is frozen
does not answer either, and would be waited for as long. So the actor also answers an empty call, `alive`, beside its
work.

Only time counts in which somebody waits for the actor (decision 46). A process that Ray restarts has the time of a
start.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

LOOK_EVERY_S = 5.0
"""Call `Heartbeat.missed` about this often while the actor is waited for."""
SILENT_S = 60.0
"""Longest time without an answer of a process that has answered before."""
START_S = 600.0
"""The same for a process that starts: it imports its modules, perhaps over a network."""


@dataclass(slots=True)
class Heartbeat:
    """The heartbeat of one actor, which has a method `alive`; `missed` mutates."""

    actor: ray.actor.ActorHandle
    clock: Callable[[], float] = time.monotonic
    _asked: ray.ObjectRef | None = field(default=None, init=False)
    _looked_s: float = field(default=float("-inf"), init=False)
    _silent_s: float = field(default=0.0, init=False)
    _starts: bool = field(default=False, init=False)

    def missed(self) -> float:
        """Seconds for which the actor has been silent, if that is too long, else 0. Never waits.

        The next answer then has the time of a start.
        """
        now = self.clock()
        waited_s = now - self._looked_s
        if waited_s < LOOK_EVERY_S:
            return 0.0
        self._looked_s = now
        self._silent_s += min(waited_s, 2 * LOOK_EVERY_S)
        self._read_answer()
        if self._asked is None:
            self._asked = self.actor.alive.remote()
        limit_s = START_S if self._starts else SILENT_S
        if self._silent_s <= limit_s:
            return 0.0
        self._starts, self._silent_s, self._asked = True, 0.0, None
        return limit_s

    def _read_answer(self) -> None:
        if self._asked is None:
            self._silent_s = 0.0  # the first look, or the first one at a successor
            return
        if not ray.wait([self._asked], timeout=0)[0]:
            return
        try:
            ray.get(self._asked)
        except ray.exceptions.RayError:  # the process has died: Ray starts another one, or the call that waits fails
            self._silent_s = self._silent_s if self._starts else 0.0
            self._starts = True
        else:
            self._silent_s, self._starts = 0.0, False
        self._asked = None
