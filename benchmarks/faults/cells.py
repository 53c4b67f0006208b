"""The table of faults: kinds of processes, phases, and what happens to the process. Pure."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

RunKind = Literal["exact", "ahead", "drafting"]
"""`exact`: a deterministic run, which ends with the weights of an undisturbed one. `ahead`: engines sample beside the
trainer, and receive weights over sockets. `drafting`: engines draft from the history."""

RUNS: Sequence[RunKind] = ("exact", "ahead", "drafting")

Fault = Literal["kill", "freeze"]
SIGNALS: dict[Fault, signal.Signals] = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
FROZEN_S = 45.0
"""Time for which a controller is frozen: longer than most deadlines of these runs, and than Ray's for a connection."""
SUSPENDED_S = 130.0
"""Time for which a whole job is stopped: longer than all deadlines of these runs."""
WHOLE_JOB = "whole job"
"""All processes of a run, as SLURM suspends a job."""

ROLES = {
    "controller": "",
    "trainer rank": "ray::TrainerActor",
    "progress reader": "ray::NodeReader",
    "engine actor": "ray::EngineActor",
    "engine core": "VLLM::EngineCore",
    "scorer": "ray::ScorerActor",
    "text actor": "ray::TextActor",
    "server of reward workers": "",
    "reward worker": "",
    "history shard": "ray::Shard",
    "history reader": "ray::Reader",
    WHOLE_JOB: "",
}
"""Title of the processes of each kind; empty for kinds that are found otherwise."""


class Moment(NamedTuple):
    """When a fault happens: names in `status.json`, and the number of finished steps."""

    phase: str
    step: int
    part: str = ""
    """Of the phase; empty for the begin of the phase."""
    scores: bool = False
    """A call of the reward function is under way, both now and at the signal; the run's calls take long for that."""

    @property
    def max_delay_s(self) -> float:
        """Most time between this moment and the signal. A part of these runs lasts a tenth of a second."""
        return 0.3 if self.scores else 0.03 if self.part else 0.1


PHASES = {
    "start": Moment("start", 0),
    "first publish": Moment("publish", 0),
    "evaluation": Moment("evaluate", 0),
    "rollout": Moment("rollout", 1),
    "scoring": Moment("rollout", 1, scores=True),
    "train": Moment("train", 1),
    "publish": Moment("publish", 1),
    "sending of weights": Moment("publish", 1, "send"),
    "proof": Moment("publish", 1, "prove"),
    "checkpoint": Moment("checkpoint", 2),
    "end": Moment("checkpoint", 3),
}
"""Moments of a run at which a fault happens."""

SCORING_AHEAD = Moment("rollout", 0, scores=True)
"""`scoring` of a run that samples ahead: the first rollout samples two steps, and the second none."""

IN_SCORING: Mapping[str, Sequence[Fault]] = {
    "scorer": ("kill", "freeze"),
    "reward worker": ("kill", "freeze"),
    "engine core": ("kill",),
}
"""Faults of `scoring` in every kind of run."""

_SUSPENDED: Mapping[RunKind, Sequence[str]] = {
    "exact": ("scoring", "train", "sending of weights", "checkpoint"),
    "ahead": ("rollout", "publish"),
    "drafting": ("rollout", "checkpoint"),
}
"""Phases in which a whole job is suspended."""


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

    @property
    def moment(self) -> Moment:
        """When it happens."""
        return SCORING_AHEAD if (self.run, self.phase) == ("ahead", "scoring") else PHASES[self.phase]

    @property
    def stopped_s(self) -> float:
        """Time until what was stopped is continued, because nothing in a run watches it; 0 if it never is."""
        if self.fault != "freeze":
            return 0.0
        return {"controller": FROZEN_S, WHOLE_JOB: SUSPENDED_S}.get(self.role, 0.0)


def cells() -> Sequence[Cell]:
    """All cells of the table."""
    aside = ("scorer", "text actor", "reward worker")  # a publish does not use them: a part of it is like its begin
    exact = [
        Cell(role=role, fault=fault, phase=phase, run="exact")
        for role in ("controller", "trainer rank", "engine actor", "engine core", *aside)
        for fault in SIGNALS
        for phase, moment in PHASES.items()
        if not moment.scores and not (moment.part and role in aside)
    ]
    scoring = [
        Cell(role=role, fault=fault, phase="scoring", run=run)
        for run in RUNS
        for role, faults in IN_SCORING.items()
        for fault in faults
    ]
    scoring += [Cell(role="server of reward workers", fault=fault, phase="scoring", run="exact") for fault in SIGNALS]
    scoring.append(Cell(role="controller", fault="freeze", phase="scoring", run="exact"))
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
    suspended = [
        Cell(role=WHOLE_JOB, fault="freeze", phase=phase, run=run)
        for run, phases in _SUSPENDED.items()
        for phase in phases
    ]
    return [*exact, *scoring, *ahead, *drafting, *suspended]
