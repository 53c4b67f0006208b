"""The arms of the benchmark: stacks of this project by their configuration keys, and the peers.

Arm 0 is the base. Arms of this project run with a trainer and an engine on a core each; `SHARED` is the base with both
cores for the engine and then for the trainer, as a user without overlap would place them. Two controls change what
the engines' drafter knows (`benchmarks.end_to_end.changed_engine`): the history of another prompt, or none. A control
drafts without the ring, which on data this small would hold every earlier response to the same prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Change = Literal["vllm_sampler", "other_history", "no_history"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to run the benchmark's training."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys of this project that differ from `OFF`."""
    change: Change | None = None
    """A change of the engines that no configuration key can make."""
    peer: Literal["plain_loop", "trl_grpo"] | None = None
    """Program of `benchmarks.end_to_end.peers` that runs instead of this project."""


OFF: Mapping[str, str] = {
    "engine.format": "bf16",
    "history.drafts": "false",
    "planner.policy": "static",
    "planner.overlap": "0",
    "planner.max_staleness": "0",
}
DRAFTS = {"history.drafts": "true"}
OVERLAP = {"planner.policy": "adaptive", "planner.overlap": "1", "planner.max_staleness": "1"}
INT8 = {"engine.format": "int8"}

BASE, SHARED, OURS = "bf16, synchronous", "bf16, synchronous, both cores", "both"
TRL, PLAIN_LOOP = "TRL without vLLM", "plain loop"
OTHER_HISTORY, NO_HISTORY = "both, other history", "both, no history"
ARMS: Mapping[str, Arm] = {
    BASE: Arm(),
    SHARED: Arm(keys={"placement.mode": "colocated", "engine.cpu_cores": "2", "trainer.cpu_threads": "2"}),
    "vLLM's sampler": Arm(change="vllm_sampler"),
    "drafts": Arm(keys=DRAFTS),
    "overlap": Arm(keys=OVERLAP),
    OURS: Arm(keys={**DRAFTS, **OVERLAP}),
    OTHER_HISTORY: Arm(keys={**DRAFTS, **OVERLAP}, change="other_history"),
    NO_HISTORY: Arm(keys={**DRAFTS, **OVERLAP}, change="no_history"),
    "int8": Arm(keys=INT8),
    "int8, both": Arm(keys={**INT8, **DRAFTS, **OVERLAP}),
    TRL: Arm(peer="trl_grpo"),
    PLAIN_LOOP: Arm(peer="plain_loop"),
}
QUICK_ARMS = (BASE, OURS)
COMPARED = (BASE, SHARED, OURS, TRL, PLAIN_LOOP)
"""Arms that goals compare, which run with more seeds."""

ACCURACY = 0.75
"""Held-out accuracy to which seconds are counted; fixed before the first measured run."""


def keys(arm: Arm) -> list[str]:
    """`key=value` of every feature that an arm switches on or off."""
    return [f"{key}={value}" for key, value in {**OFF, **arm.keys}.items()]
