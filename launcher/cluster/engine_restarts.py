"""Restarts engines that died: a new process with the same number, connected to the trainer and to the history.

A new engine is fenced until the next publish, which sends it all weights. A delta does not distinguish versions of
different engines, so the channels of all engines are set up again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launcher.cluster.processes import START_TIMEOUT_S, Processes
from megatron_rl.controller.colocation import DeviceSharing
from megatron_rl.controller.delivery import WeightDelivery
from rollout.engine.spec import EngineSpec
from rollout.failures import EnginesLostError, Place
from rollout.pool.engine_group import EngineGroup
from rollout.pool.history_client import ANSWER_TIMEOUT_S, HistoryClient
from rollout.types import EngineSlot

PING_TIMEOUT_S = 30.0
"""Time in which every rank of an engine that does not sample must answer."""


@dataclass(slots=True, kw_only=True)
class LostEngines:
    """Finds the lost engines of a run and starts them again; it counts over all trainers of the run."""

    running: Processes
    engines: EngineGroup
    specs: Sequence[EngineSpec]
    slots: Sequence[EngineSlot]
    max_restarts: int
    say: Callable[[str], None]
    num_restarts: int = field(default=0, init=False)

    def find(self, *, hung: bool) -> tuple[int, ...]:
        """Numbers of the lost engines. `hung`: engines that do not answer are ended, and are lost."""
        self.engines.check_alive(timeout_s=ANSWER_TIMEOUT_S)
        if hung:
            self.engines.end_silent(timeout_s=PING_TIMEOUT_S)
        return self.engines.lost

    def start_again(self, sharing: DeviceSharing | None) -> None:
        """Start each lost engine, not connected to anything.

        Raises:
            EnginesLostError: more engines died in this run than `max_restarts` allows.
            RuntimeError: a restarted engine failed to start.
        """
        lost = self.engines.lost
        self.num_restarts += len(lost)
        for number in lost:
            self.say(f"engine {number} died and is restarted: {self.engines.loss_reason(number)}")
        if self.num_restarts > self.max_restarts:
            raise EnginesLostError(
                f"engines have died {self.num_restarts} times, `engine.max_restarts` = {self.max_restarts} allows "
                f"fewer; last reason: {self.engines.loss_reason(lost[-1])}",
                Place(role="engine", ranks=lost),
            )
        self.running.end([self.engines.actors[number] for number in lost])
        groups = {number: self.running.begin_engines([self.specs[number]], [self.slots[number]]) for number in lost}
        for number, (group, starting) in groups.items():
            group.finish_start(starting, timeout_s=START_TIMEOUT_S)
            if sharing is not None:
                sharing.follow(group)
            self.engines.replace(number, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRestarter:
    """Restarts engines beside a trainer; satisfies `megatron_rl.controller.engine_revival.EngineRestarter`."""

    lost: LostEngines
    delivery: WeightDelivery
    history: HistoryClient | None
    sharing: DeviceSharing | None
    """None: trainer and engines stay in memory side by side."""

    @property
    def num_restarts(self) -> int:
        """Engines restarted in this run."""
        return self.lost.num_restarts

    def restart_lost(self, *, after_failure: bool = False) -> int:
        """Restart each lost engine; returns their number. A restarted engine needs a publish before it serves.

        `after_failure`: a call to engines has failed, so engines that hang are looked for and count as lost.

        Raises:
            EnginesLostError: more engines died in this run than `engine.max_restarts` allows.
            RuntimeError: a restarted engine failed to start.
        """
        lost = self.lost.find(hung=after_failure)
        if not lost:
            return 0
        if self.sharing is not None:
            self.sharing.to_start()
        self.lost.start_again(self.sharing)
        self.delivery.connect()
        if self.history is not None:
            self.history.connect()
        return len(lost)
