"""Brings engines back that have died: another process under the same number, joined to the trainer and to the history.

The new engine is fenced until the next publish, which brings it all weights: versions of different engines cannot
be told apart by a delta, so channels begin anew for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launcher.cluster.processes import START_TIMEOUT_S, Processes
from megatron_rl.controller.delivery import WeightDelivery
from rollout.engine.spec import EngineSpec
from rollout.failures import EnginesLostError, Place
from rollout.pool.engine_group import EngineGroup
from rollout.pool.history_client import ANSWER_TIMEOUT_S, HistoryClient
from rollout.types import EngineSlot


@dataclass(slots=True, kw_only=True)
class EngineRestarter:
    """The engines of a run; satisfies `megatron_rl.controller.engine_revival.EngineRestarter`."""

    running: Processes
    engines: EngineGroup
    specs: Sequence[EngineSpec]
    slots: Sequence[EngineSlot]
    delivery: WeightDelivery
    history: HistoryClient | None
    max_restarts: int
    say: Callable[[str], None]
    num_restarts: int = field(default=0)

    def restart_lost(self) -> int:
        """Start another engine for each that is lost; returns how many. They need a publish before they serve.

        Raises:
            EnginesLostError: engines of this run have died too often.
            RuntimeError: one does not come up.
        """
        self.engines.check_alive(timeout_s=ANSWER_TIMEOUT_S)
        lost = self.engines.lost
        if not lost:
            return 0
        self.num_restarts += len(lost)
        for number in lost:
            self.say(f"engine {number} died and is started again: {self.engines.loss_reason(number)}")
        if self.num_restarts > self.max_restarts:
            raise EnginesLostError(
                f"engines have died {self.num_restarts} times, engine.max_restarts = {self.max_restarts} times are "
                f"allowed; the last one of: {self.engines.loss_reason(lost[-1])}",
                Place(role="engine", ranks=lost),
            )
        self.running.end([self.engines.actors[number] for number in lost])
        begun = {number: self.running.begin_engines([self.specs[number]], [self.slots[number]]) for number in lost}
        for number, (single, starting) in begun.items():
            single.wait(starting, timeout_s=START_TIMEOUT_S)
            self.engines.replace(number, single.actors[0])
        self.delivery.connect()
        if self.history is not None:
            self.history.connect()
        return len(lost)
