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
class EngineRestarter:
    """The engines of a run; satisfies `megatron_rl.controller.engine_revival.EngineRestarter`."""

    running: Processes
    engines: EngineGroup
    specs: Sequence[EngineSpec]
    slots: Sequence[EngineSlot]
    delivery: WeightDelivery
    history: HistoryClient | None
    sharing: DeviceSharing | None
    """None: trainer and engines stay in memory side by side."""
    max_restarts: int
    say: Callable[[str], None]
    num_restarts: int = field(default=0)

    def restart_lost(self, *, after_failure: bool = False) -> int:
        """Restart each lost engine; returns their number. A restarted engine needs a publish before it serves.

        `after_failure`: a call to engines has failed, so engines that hang are looked for and count as lost.

        Raises:
            EnginesLostError: more engines died in this run than `max_restarts` allows.
            RuntimeError: a restarted engine failed to start.
        """
        self.engines.check_alive(timeout_s=ANSWER_TIMEOUT_S)
        if after_failure:
            self.engines.end_silent(timeout_s=PING_TIMEOUT_S)
        lost = self.engines.lost
        if not lost:
            return 0
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
        if self.sharing is not None:
            self.sharing.to_start()
        groups = {number: self.running.begin_engines([self.specs[number]], [self.slots[number]]) for number in lost}
        for number, (group, starting) in groups.items():
            group.finish_start(starting, timeout_s=START_TIMEOUT_S)
            if self.sharing is not None:
                self.sharing.follow(group)
            self.engines.replace(number, group)
        self.delivery.connect()
        if self.history is not None:
            self.history.connect()
        return len(lost)
