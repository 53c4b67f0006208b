"""Tells whether the process of an actor still runs, apart from whether its work comes forward.

A call of such an actor may take minutes for good reasons: a slow disk, a slow reward function. A process that is frozen
does not answer either, and would be waited for as long. So the actor also answers an empty call, `alive`, beside its
work.

Only time counts in which somebody waits for the actor (decision 46). A process that Ray restarts has the time of a
start.

The answer says which process it is, so that one that hangs is named with its node, and leaves its stacks.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from rollout.processes import ProcessId
from rollout.remote_kill import kill_on_nodes

LOOK_EVERY_S = 5.0
"""Call `Heartbeat.missed` about this often while the actor is waited for."""
SILENT_S = 60.0
"""Longest time without an answer of a process that has answered before."""
START_S = 600.0
"""The same for a process that starts: it imports its modules, perhaps over a network."""


@dataclass(slots=True)
class Heartbeat:
    """The heartbeat of one actor that Ray restarts and that has a method `alive`. All methods but `named` mutate."""

    actor: ray.actor.ActorHandle
    clock: Callable[[], float] = time.monotonic
    process: ProcessId | None = field(default=None, init=False)
    """The process that answered last; None before the first answer, and after it has ended."""
    _asked: ray.ObjectRef | None = field(default=None, init=False)
    _looked_s: float | None = field(default=None, init=False)
    _silent_s: float = field(default=0.0, init=False)
    _starts: bool = field(default=False, init=False)

    def missed(self) -> float:
        """Seconds for which the actor has been silent, if that is too long, else 0. Never waits.

        The next answer then has the time of a start.
        """
        now = self.clock()
        if self._looked_s is not None and now - self._looked_s < LOOK_EVERY_S:
            return 0.0
        if self._looked_s is not None:
            self._silent_s += min(now - self._looked_s, 2 * LOOK_EVERY_S)
        self._looked_s = now
        self.ask()
        limit_s = START_S if self._starts else SILENT_S
        if self._silent_s <= limit_s:
            return 0.0
        self._starts, self._silent_s, self._asked = True, 0.0, None
        return limit_s

    def ask(self) -> None:
        """Ask, if no question is open. Before a long call it makes the process known. Never waits."""
        self._read_answer()
        if self._asked is None:
            self._asked = self.actor.alive.remote()

    def note(self, process: ProcessId) -> None:
        """This process has answered another call, perhaps late and after its successor.

        On one node the successor is who started later. Starts on two nodes cannot be compared: the last answer counts.
        """
        known = self.process
        if known is None or process.node_id != known.node_id or process.start_ticks >= known.start_ticks:
            self.process = process

    def named(self, name: str) -> str:
        """The actor's name, with its process and node where they are known, for messages."""
        return name if self.process is None else f"{name} ({self.process})"

    @property
    def host(self) -> str:
        """Name of the actor's machine; empty where unknown."""
        return "" if self.process is None else self.process.host

    def end(self) -> tuple[str, ...]:
        """End a process that hangs, and Ray starts another one. Its stacks are written; returns the folders with them.

        Ray ends a process that has never answered, without stacks. An answer that is unread by now is the old one's.
        """
        process, self.process = self.process, None
        self._starts, self._asked = True, None
        if process is None:
            ray.kill(self.actor, no_restart=False)
            return ()
        return kill_on_nodes([process], stacks=True)

    def _read_answer(self) -> None:
        if self._asked is None:
            self._silent_s = 0.0  # the first look, or the first one at a successor
            return
        if not ray.wait([self._asked], timeout=0)[0]:
            return
        try:
            self.process = ray.get(self._asked)
        except ray.exceptions.RayError:  # the process has died: Ray starts another one, or the call that waits fails
            self.process = None
            self._silent_s = self._silent_s if self._starts else 0.0
            self._starts = True
        else:
            self._silent_s, self._starts = 0.0, False
        self._asked = None
