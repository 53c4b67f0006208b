"""Replaces a trainer that failed: ends its processes, and brings the engines into the state of a start.

All ranks are lost together, because the peers of a lost rank wait for it in collectives. The caller starts new ranks
from the newest checkpoint, those of a lost node on the node that replaces it. Engines and history stay. Responses in
flight are given up, because the steps since the checkpoint are sampled again.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from launcher.cluster.processes import START_TIMEOUT_S, Processes
from launcher.recovery.engines import LostEngines
from launcher.recovery.restart_limit import WINDOW_STEPS, RestartLimit
from megatron_rl.controller.colocation import DeviceSharing
from megatron_rl.controller.controller import Repeated
from megatron_rl.trainer.group import TrainerGroup
from rollout.failures import PlacedError, StepLostError
from rollout.pool.engine_pool import EnginePool
from rollout.pool.history_client import HistoryClient
from rollout.transports.shm_files import sweep


@dataclass(slots=True, kw_only=True)
class TrainerRestarts:
    """The trainers of a run."""

    running: Processes
    lost_engines: LostEngines
    history: HistoryClient | None
    update_timeout_s: float
    """For which an engine may wait for weights that a dead trainer does not send (`engine.update_timeout_s`)."""
    limit: RestartLimit
    """Of `trainer.max_restarts`."""
    say: Callable[[str], None]
    repeated: Repeated = field(default=Repeated(), init=False)
    totals: Mapping[str, float] = field(default_factory=dict, init=False)
    """What the controllers of earlier trainers have counted, by metric (`Controller.totals`)."""

    def check(self, error: PlacedError) -> None:
        """Raise `error` unless a return to the checkpoint repairs it.

        It does not repair another role's failure, a lost node that no other replaces, or too many failures.
        """
        if error.place.role != "trainer" and not isinstance(error, StepLostError):
            raise error
        if self.limit.num_counted >= self.limit.max_restarts:
            if self.limit.max_restarts:
                error.add_note(
                    f"the trainer was restarted `trainer.max_restarts` = {self.limit.max_restarts} times in the last "
                    f"{WINDOW_STEPS} finished steps"
                )
            raise error
        self._check_nodes(error)

    def _check_nodes(self, error: PlacedError, suspects: Collection[str] = ()) -> None:
        nodes = self.lost_engines.nodes
        nodes.follow(suspects)
        if nodes.unplaced:
            self.say(f"the run ends, because {nodes.unplaced}")
            raise error

    def clear(
        self, error: PlacedError, trainer: TrainerGroup, pool: EnginePool | None, sharing: DeviceSharing | None
    ) -> None:
        """End what is left of the trainer, empty the engines, and restart those that died with it.

        Args:
            error: the failure.
            trainer: the ranks that failed.
            pool: the pool that has given groups to the engines; None if none was begun.
            sharing: state of the devices; None if trainer and engines stay in memory together.

        Raises:
            EnginesLostError: engines died more often than `engine.max_restarts` allows.
            PlacedError: `error`, because no node replaces a lost one.
        """
        trainer.ranks.kill_and_wait()
        # again: Ray needs some seconds to know that a node is gone
        self._check_nodes(error, {rank.node for rank in self.lost_engines.nodes.placement.trainers})
        if trainer in self.running.trainers:
            self.running.end_trainer(trainer)
        sweep()
        if pool is not None:
            pool.cancel()
        self.lost_engines.engines.start_over(timeout_s=self.update_timeout_s + START_TIMEOUT_S)
        if sharing is not None:
            sharing.to_new_trainer()  # first, because an engine may die in it
        if self.lost_engines.find(hung=True):
            self.lost_engines.start_again(sharing)
            if self.history is not None:
                self.history.connect()

    def count(self, num_steps: int) -> None:
        """A trainer is about to start again; `num_steps` finished steps are repeated."""
        self.limit.note()
        self.repeated = Repeated(num_restarts=self.limit.num_restarts, num_steps=self.repeated.num_steps + num_steps)
