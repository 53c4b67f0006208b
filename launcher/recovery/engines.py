"""Restarts engines that died: a new process with the same number, connected to the trainer and to the history.

An engine of a lost node starts on another node, or is given up (`launcher.recovery.nodes`).

A new engine is fenced until the next publish, which sends it all weights. A delta does not distinguish versions of
different engines, so the channels of all engines are set up again. An engine that is lost meanwhile is started, too.

A new engine reads the model's folder anew, perhaps another node's copy of it. So its model is compared with the
trainer's, as at the start of the run: a publish does not show another rotary base or epsilon.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launcher.cluster.processes import Processes
from launcher.recovery.nodes import LostNodes
from launcher.recovery.restart_limit import WINDOW_STEPS, RestartLimit
from megatron_rl.controller.colocation import DeviceSharing
from megatron_rl.controller.delivery import WeightDelivery
from rollout.engine.spec import EngineSpec
from rollout.failures import EnginesLostError, Place, PlacedError, ProcessLostError
from rollout.pool.engine_group import EngineGroup
from rollout.pool.history_client import ANSWER_TIMEOUT_S, HistoryClient
from rollout.types import EngineSlot

_log = logging.getLogger(__name__)

PING_TIMEOUT_S = 30.0
"""Time in which every rank of an engine that does not sample must answer."""


@dataclass(slots=True, kw_only=True)
class LostEngines:
    """Finds the lost engines of a run and starts them again; it counts over all trainers of the run."""

    running: Processes
    engines: EngineGroup
    specs: Sequence[EngineSpec]
    nodes: LostNodes
    limit: RestartLimit
    """Of `engine.max_restarts`. Engines of lost nodes do not count."""
    say: Callable[[str], None]
    check_model: Callable[[int, EngineGroup], None]
    """Called with a number and the engine that has just started under it. Raises if its model is not the trainer's."""
    _slots: list[EngineSlot] = field(init=False)
    """Where each engine was started last."""

    def __post_init__(self) -> None:
        self._slots = list(self.nodes.placement.engines)

    def find(self, *, hung: bool) -> tuple[int, ...]:
        """Numbers of the lost engines, without retired ones. `hung`: engines that do not answer are ended, and lost.

        Engines whose node now belongs to the trainer are lost, too.
        """
        if hung:
            self.engines.end_silent(timeout_s=PING_TIMEOUT_S)  # first, because vLLM notices a death when it is asked
        self.engines.check_alive(timeout_s=ANSWER_TIMEOUT_S)
        for number in self.engines.alive:
            if self._has_moved(number):
                self.engines.mark_lost(number, f"its place on {self._slots[number].node} is taken by another process")
        return tuple(number for number in self.engines.lost if number not in self.engines.retired)

    def start_again(self, sharing: DeviceSharing | None) -> None:
        """Start each lost engine, not connected to anything; an engine without a node is retired.

        Raises:
            EnginesLostError: engines died more often than `limit` allows.
            LaunchError: a restarted engine has built another model than the trainer.
            ProcessLostError: no engine is left, or the trainer has no place, because their nodes are lost.
            RuntimeError: a restarted engine failed to start.
        """
        lost = [number for number in self.engines.lost if number not in self.engines.retired]
        self.nodes.follow(suspects={self._slots[number].node for number in lost})
        if self.nodes.unplaced:  # the lost engines have no place either
            raise ProcessLostError(self.nodes.unplaced, Place(role="trainer"))
        placement = self.nodes.placement
        for number in lost:
            reason = self.engines.loss_reason(number)
            if number in placement.retired:
                self.engines.retire(number, reason)
            elif not self._has_moved(number):
                self.limit.note()
                self.say(f"engine {number} died and is restarted: {reason}")
        self._check_number(lost)
        self.running.end([self.engines.actors[number] for number in lost])
        groups = {
            number: self.running.begin_engines([self.specs[number]], [placement.engines[number]])
            for number in lost
            if number not in self.engines.retired
        }
        for number, (group, starting) in groups.items():
            group.finish_start(starting, timeout_s=self.specs[number].config.start_timeout_s)
            self.check_model(number, group)
            if sharing is not None:
                sharing.follow(group)
            self.engines.replace(number, group)
            self._slots[number] = placement.engines[number]

    def _has_moved(self, number: int) -> bool:
        """Whether the placement no longer has the engine where it was started."""
        placement = self.nodes.placement
        return number in placement.retired or self._slots[number] != placement.engines[number]

    def _check_number(self, lost: Sequence[int]) -> None:
        num_counted = self.limit.num_counted
        if num_counted > self.limit.max_restarts:
            raise EnginesLostError(
                f"engines have died {num_counted} times within {WINDOW_STEPS} finished steps, `engine.max_restarts` = "
                f"{self.limit.max_restarts} allows fewer; last reason: {self.engines.loss_reason(lost[-1])}",
                Place(role="engine", ranks=tuple(lost)),
            )
        if len(self.engines.retired) == len(self.engines):
            raise ProcessLostError(
                "no engine is left, because their nodes are lost", Place(role="engine", ranks=self.engines.retired)
            )


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
        """Engines restarted in this run, without those of lost nodes."""
        return self.lost.limit.num_restarts

    @property
    def num_lost_nodes(self) -> int:
        """Nodes that the run has lost."""
        return self.lost.nodes.num_lost

    @property
    def num_serving(self) -> int:
        """Engines that were not given up."""
        return len(self.lost.nodes.placement.serving)

    def restart_lost(self, *, ask_ranks: bool = False) -> int:
        """Restart or retire each lost engine; returns their number. Restarted engines need a publish before they serve.

        `ask_ranks`: every rank must answer. So engines count as lost that hang, or whose death vLLM has not noticed.

        Raises:
            EnginesLostError: engines died more often than `engine.max_restarts` allows.
            LaunchError: a restarted engine has built another model than the trainer.
            RuntimeError: a restarted engine failed to start, no engine is left, or the trainer failed.
        """
        num_lost, lost = 0, self.lost.find(hung=ask_ranks)
        while lost:
            num_lost += len(lost)
            if self.sharing is not None:
                self.sharing.to_start()
            self.lost.start_again(self.sharing)
            lost = self._connect()
        return num_lost

    def _connect(self) -> tuple[int, ...]:
        """Connect all engines; returns those that were lost meanwhile. Without any, an error is raised as it is."""
        try:
            self.delivery.connect()
            if self.history is not None:
                self.history.connect()
        except RuntimeError as error:
            if isinstance(error, PlacedError) and error.place.role == "trainer":
                raise
            # ranks are asked only if no process has ended, because an engine that samples may answer late
            lost = self.lost.find(hung=False) or self.lost.find(hung=True)
            if not lost:
                raise
            _log.warning("engine(s) %s were lost while all engines were connected: %s", list(lost), error)
            return lost
        return ()
