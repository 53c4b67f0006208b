"""Recovers from the loss of all engines during a rollout: restarts engines and publishes the last weights to them."""

from dataclasses import dataclass
from typing import Protocol

from megatron_rl.controller.phases import PhaseClock, Sharing
from megatron_rl.controller.publisher import Publisher


class EngineRestarter(Protocol):
    """Restarts dead engines; `launcher.recovery.engines.EngineRestarter` in a run."""

    @property
    def num_restarts(self) -> int:
        """Engines restarted in this run."""

    @property
    def num_lost_nodes(self) -> int:
        """Nodes that the run has lost."""

    @property
    def num_serving(self) -> int:
        """Engines that were not given up."""

    def restart_lost(self, *, ask_ranks: bool = False) -> int:
        """Restart or give up every lost engine; returns their number. They need a publish before they serve.

        `ask_ranks`: every rank must answer. So engines count as lost that hang, or whose death vLLM has not noticed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRevival:
    """Called by `EnginePool` when no engine is left; returns when restarted engines serve."""

    restarter: EngineRestarter
    publisher: Publisher
    clock: PhaseClock
    sharing: Sharing | None
    """None: trainer and engines stay in memory side by side."""

    def __call__(self) -> None:
        """Restart every lost engine, and publish the last version again."""
        self.restarter.restart_lost()
        if self.sharing is not None:
            self.sharing.to_publish()
        with self.clock.phase("publisher", "publish"):
            self.publisher.publish(self.publisher.version)
