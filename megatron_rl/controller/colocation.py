"""What engines with unfinished responses do while the trainer works: they pause, or sample on.

Only with `planner.overlap` or `planner.head_start` is anything unfinished then.

`DeviceSharing`: who holds the devices that trainer and engines share: calls that make room for whoever works next.

A colocated step on GPUs: engines sample while the trainer is in host memory; they sleep while it trains; its gradients
and optimizer leave again, engines wake their weights and are sent new ones; the trainer's weights leave when the last
proof that needs them is made, and only then keys and values come back. Nothing here moves weights between the two.

Invariant: engines that slept serve nothing before a publish has brought them weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.trainer.group import TrainerGroup
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool


class PauseEngines:
    """`placement.mode` = colocated: engines pause, and keep what they have begun."""

    def __init__(self, engines: EngineGroup, *, timeout_s: float, leaves_work: bool) -> None:
        """Without `leaves_work` all that was admitted is finished when the trainer begins, and nobody is asked."""
        self._engines = engines
        self._timeout_s = timeout_s
        self._leaves_work = leaves_work
        self._are_paused = False

    @contextmanager
    def trainer_works(self) -> Iterator[None]:
        """Engines pause, and do so until they are waited for."""
        if self._leaves_work and not self._are_paused:
            self._engines.pause_sampling(timeout_s=self._timeout_s)
            self._are_paused = True
        yield

    def engines_work(self) -> None:
        """They go on."""
        if self._are_paused:
            self._engines.resume_sampling(timeout_s=self._timeout_s)
            self._are_paused = False


class KeepSampling:
    """`placement.mode` = disaggregated: engines go on, and are given what waits."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    @contextmanager
    def trainer_works(self) -> Iterator[None]:
        """The pool works in the background."""
        with self._pool.run_in_background():
            yield

    def engines_work(self) -> None:
        """They never stopped."""


@dataclass(slots=True, kw_only=True)
class DeviceSharing:
    """How one trainer and its engines share devices; satisfies `megatron_rl.controller.phases.Sharing`."""

    trainer: TrainerGroup
    engines: EngineGroup
    offload: Literal["none", "optimizer", "all"]
    """What of the trainer leaves while engines sample."""
    sleep: bool
    """Whether engines give up their memory while the trainer works."""
    timeout_s: float
    asleep: bool = field(default=False)
    """Engines hold no weights: a publish comes before they serve."""

    def to_trainer(self) -> None:
        """Before it trains or saves."""
        if self.sleep and not self.asleep:
            self.engines.sleep(timeout_s=self.timeout_s)
            self.asleep = True
        if self.offload != "none":
            self.trainer.onload()

    def to_publish(self) -> None:
        """Before weights are sent: only the trainer's weights and the engines' are there."""
        if self.offload != "none":
            self.trainer.offload(("gradients", "optimizer"))
        if self.asleep:
            self.engines.wake("weights", timeout_s=self.timeout_s)

    def to_engines(self) -> None:
        """When the trainer has no further part in a publish: engines may forward."""
        if self.offload == "all":
            self.trainer.offload(("weights",))
        if self.asleep:
            self.engines.wake("kv_cache", timeout_s=self.timeout_s)
            self.asleep = False
