"""What a run does where no engine is left in the middle of a rollout: another is started and given the weights."""

from dataclasses import dataclass
from typing import Protocol

from megatron_rl.controller.phases import PhaseClock, Sharing
from megatron_rl.controller.publisher import Publisher


class EngineRestarter(Protocol):
    """Brings engines back that have died; `launcher.cluster.engine_restarts.EngineRestarter` in a run."""

    @property
    def num_restarts(self) -> int:
        """Engines that have been started again in this run."""

    def restart_lost(self) -> int:
        """Start another engine for each that is lost; returns how many. They need a publish before they serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRevival:
    """Called by the pool (`EnginePool`) when no engine is left; returns when there is one that serves."""

    restarter: EngineRestarter
    publisher: Publisher
    clock: PhaseClock
    sharing: Sharing | None
    """None: trainer and engines stay in memory side by side."""

    def __call__(self) -> None:
        """Start an engine for each that is lost, and bring it the version that was published last."""
        self.restarter.restart_lost()
        if self.sharing is not None:
            self.sharing.to_publish()
        with self.clock.phase("publisher", "publish"):
            self.publisher.publish(self.publisher.version)
