"""Time sharing of devices between the trainer and the engines.

`PauseEngines` and `KeepSampling` set what engines with unfinished responses do while the trainer works. Responses are
unfinished at that time with `planner.overlap` or `planner.head_start`, and in a save after an evaluation.

`DeviceSharing` frees device memory for the trainer or the engines, whichever works next. A colocated step on GPUs:

1. Engines sample. The trainer is in host memory.
2. Engines sleep. The trainer trains.
3. The trainer offloads gradients and optimizer. Engines allocate their weights and receive new ones.
4. After its last part in checking the publish, the trainer releases the sent buckets and offloads its weights. Engines
   allocate keys and values.

Weights are sent elsewhere (`megatron_rl.controller.delivery`).

An engine that dies or hangs in a switch is lost, and the switch succeeds for the others (`EngineGroup.sleep`). So all
living engines are in the same state, and an engine that replaces a lost one joins them in it (`DeviceSharing.follow`).

Invariant: an engine that slept serves nothing before a publish has given it weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.trainer.group import TrainerGroup
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool


class PauseEngines:
    """`placement.mode` = colocated: engines pause and keep their unfinished responses."""

    def __init__(self, engines: EngineGroup, pool: EnginePool, *, timeout_s: float) -> None:
        """Engines of a pool without groups have nothing to pause."""
        self._engines = engines
        self._pool = pool
        self._timeout_s = timeout_s
        self._are_paused = False

    @contextmanager
    def trainer_works(self) -> Iterator[None]:
        """Pause the engines; they stay paused until `engines_work`."""
        if self._pool.has_groups and not self._are_paused:
            self._engines.pause_sampling(timeout_s=self._timeout_s)
            self._are_paused = True
        yield

    def engines_work(self) -> None:
        """Resume sampling."""
        if self._are_paused:
            self._engines.resume_sampling(timeout_s=self._timeout_s)
            self._are_paused = False


class KeepSampling:
    """`placement.mode` = disaggregated: engines continue to sample and receive waiting requests."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    @contextmanager
    def trainer_works(self) -> Iterator[None]:
        """Run the pool in the background within the context."""
        with self._pool.run_in_background():
            yield

    def engines_work(self) -> None:
        """Nothing to do, because engines never paused."""


@dataclass(slots=True, kw_only=True)
class DeviceSharing:
    """How one trainer and its engines share devices; satisfies `megatron_rl.controller.phases.Sharing`."""

    trainer: TrainerGroup
    engines: EngineGroup
    offload: Literal["none", "optimizer", "all"]
    """Trainer state that is in host memory while engines sample."""
    sleep: bool
    """Whether engines free their device memory while the trainer works."""
    timeout_s: float
    asleep: bool = field(default=False)
    """Whether engines hold no weights. A publish must come before they serve."""
    has_woken_weights: bool = field(default=False)
    """Whether sleeping engines have memory for weights again; true within a publish, and after one that failed."""
    has_weights_away: bool = field(default=False)
    """Whether the trainer's weights are in host memory."""

    def to_trainer(self) -> None:
        """Free devices for the trainer. Call it before the trainer trains or saves."""
        if self.sleep and not self.asleep:
            self.engines.sleep(timeout_s=self.timeout_s)
            self.asleep = True
        self._onload()

    def to_publish(self) -> None:
        """Leave only the weights of trainer and engines on the devices. Call it before weights are sent.

        A publish may be repeated, because an engine died after the trainer's weights had left the devices.
        """
        if self.has_weights_away:
            if self.sleep and not self.asleep:
                self.engines.sleep(timeout_s=self.timeout_s)
                self.asleep = True
            self._onload()
        if self.offload != "none":
            self.trainer.offload(("gradients", "optimizer"))
        if self.asleep and not self.has_woken_weights:
            self.engines.wake("weights", timeout_s=self.timeout_s)
            self.has_woken_weights = True

    def to_engines(self) -> None:
        """Free devices for the engines, which may forward afterwards. Call it after the trainer's part in a publish."""
        if self.offload == "all":
            self.trainer.offload(("weights",))
            self.has_weights_away = True
        if self.asleep:
            # sent buckets may lie on the device, and a delivery only begins to release them
            self.trainer.finish_unstage(timeout_s=self.timeout_s)
            self.engines.wake("kv_cache", timeout_s=self.timeout_s)
            self.asleep = self.has_woken_weights = False

    def to_start(self) -> None:
        """Free devices for engines that start while others run."""
        if self.offload != "none":
            self.trainer.offload(("gradients", "optimizer"))
        if self.offload == "all":
            self.trainer.offload(("weights",))
            self.has_weights_away = True

    def to_new_trainer(self) -> None:
        """Free devices for a trainer that starts, when the last one has ended at any point of a step."""
        if self.sleep:
            self.engines.sleep(timeout_s=self.timeout_s)
            self.asleep, self.has_woken_weights = True, False

    def follow(self, started: EngineGroup) -> None:
        """Bring engines that have just started, and hold all their memory, into the state of the others."""
        if self.asleep:
            started.sleep(timeout_s=self.timeout_s)
        if self.has_woken_weights:
            started.wake("weights", timeout_s=self.timeout_s)

    def _onload(self) -> None:
        if self.offload != "none":
            self.trainer.onload()
        self.has_weights_away = False
