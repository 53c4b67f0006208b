"""The table of faults: kinds of processes, phases, and what happens to the process. Pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

RunKind = Literal["exact", "ahead", "drafting"]
"""`exact`: a deterministic run, which ends with the weights of an undisturbed one. `ahead`: engines sample beside the
trainer, and receive weights over sockets. `drafting`: engines draft from the history."""

Fault = Literal["kill", "freeze"]
SIGNALS: dict[Fault, signal.Signals] = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}

ROLES = {
    "controller": "",
    "trainer rank": "ray::TrainerActor",
    "progress reader": "ray::NodeReader",
    "engine actor": "ray::EngineActor",
    "engine core": "VLLM::EngineCore",
    "scorer": "ray::ScorerActor",
    "text actor": "ray::TextActor",
    "reward worker": "",
    "history shard": "ray::Shard",
    "history reader": "ray::Reader",
}
"""Title of the processes of each kind; empty for kinds that are found otherwise."""

PHASES = {
    "start": ("start", 0),
    "first publish": ("publish", 0),
    "evaluation": ("evaluate", 0),
    "rollout": ("rollout", 1),
    "train": ("train", 1),
    "publish": ("publish", 1),
    "checkpoint": ("checkpoint", 2),
    "end": ("checkpoint", 3),
}
"""Name of each phase in `status.json`, and the number of finished steps at which the fault happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fault."""

    role: str
    fault: Fault
    phase: str
    run: RunKind

    @property
    def name(self) -> str:
        """For people and for `--only`."""
        return f"{self.run}: {self.fault} {self.role} in {self.phase}"


def cells() -> Sequence[Cell]:
    """All cells of the table.

    A frozen controller is not among them: nobody in the run watches it, and the run goes on when it is continued.
    """
    scoring = ("scorer", "text actor", "reward worker")
    exact = [
        Cell(role=role, fault=fault, phase=phase, run="exact")
        for role in ("controller", "trainer rank", "engine actor", "engine core", *scoring)
        for fault in SIGNALS
        for phase in PHASES
        if (role, fault) != ("controller", "freeze")
    ]
    exact += [
        Cell(role="progress reader", fault=fault, phase=phase, run="exact")
        for fault in SIGNALS
        for phase in ("train", "publish")
    ]
    ahead = [
        Cell(role=role, fault=fault, phase=phase, run="ahead")
        for role in ("trainer rank", "engine core")
        for fault in SIGNALS
        for phase in ("rollout", "train", "publish")
    ]
    drafting = [
        Cell(role=role, fault=fault, phase=phase, run="drafting")
        for role in ("history shard", "history reader")
        for fault in SIGNALS
        for phase in ("rollout", "train", "checkpoint")
    ]
    return [*exact, *ahead, *drafting]
