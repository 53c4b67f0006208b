"""Who holds the devices that trainer and engines share: calls that make room for whoever works next.

A colocated step on GPUs: engines sample while the trainer is in host memory; they sleep while it trains; its gradients
and optimizer leave again, engines wake their weights and are sent new ones; the trainer's weights leave when the last
proof that needs them is made, and only then keys and values come back. Nothing here moves weights between the two.

Invariant: engines that slept serve nothing before a publish has brought them weights.
"""

from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.trainer_group import TrainerGroup
from rollout.engine_group import EngineGroup


@dataclass(slots=True, kw_only=True)
class DeviceTurns:
    """Turns of one trainer and its engines; satisfies `megatron_rl.phases.Turns`."""

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
            self.engines.call("sleep", timeout_s=self.timeout_s)
            self.asleep = True
        if self.offload != "none":
            self.trainer.move_in()

    def to_publish(self) -> None:
        """Before weights are sent: only the trainer's weights and the engines' are there."""
        if self.offload != "none":
            self.trainer.move_out(("gradients", "optimizer"))
        if self.asleep:
            self.engines.call("wake", "weights", timeout_s=self.timeout_s)

    def to_engines(self) -> None:
        """When the trainer has no further part in a publish: engines may forward."""
        if self.offload == "all":
            self.trainer.move_out(("weights",))
        if self.asleep:
            self.engines.call("wake", "kv_cache", timeout_s=self.timeout_s)
            self.asleep = False
