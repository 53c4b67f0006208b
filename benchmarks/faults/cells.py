"""The table of faults: kinds of processes, phases, and what happens to the process. Pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Moment(NamedTuple):
    """When a fault happens: names in `status.json`, and the number of finished steps."""

    phase: str
    step: int
    part: str = ""
    """Of the phase; empty for the begin of the phase."""

    @property
    def max_delay_s(self) -> float:
        """Most time between this moment and the signal. A part of these runs lasts a tenth of a second."""
        return 0.03 if self.part else 0.1


PHASES = {
    "start": Moment("start", 0),
    "first publish": Moment("publish", 0),
    "evaluation": Moment("evaluate", 0),
    "rollout": Moment("rollout", 1),
    "train": Moment("train", 1),
    "publish": Moment("publish", 1),
    "sending of weights": Moment("publish", 1, "send"),
    "proof": Moment("publish", 1, "prove"),
    "checkpoint": Moment("checkpoint", 2),
    "end": Moment("checkpoint", 3),
}
"""Moments of a run at which a fault happens. Responses are scored during the rollout, as they end."""


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
        for phase, moment in PHASES.items()
        if (role, fault) != ("controller", "freeze") and not (moment.part and role in scoring)
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
