"""Seconds of each phase between the submission of a job and the end of its first step.

The batch script writes the phases before the run to a file, a line each: the begin in seconds since 1970, and the name.
The phases of the run itself come from `status.json`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.run_dir.status import Now


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The begin of a phase, wall clock."""

    name: str
    begin_s: float


def read_phases(path: Path) -> list[Phase]:
    """Phases that the batch script has written; none if it is a copy of the template without them."""
    if not path.exists():
        return []
    lines = [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Phase(name=name, begin_s=float(begin_s)) for begin_s, name in lines]


@dataclass(slots=True, kw_only=True)
class StartPhases:
    """Follows a start until its first step has ended."""

    phases: list[Phase] = field(default_factory=list)
    done: bool = False

    def follow(self, now: Now | None, *, first_step: int) -> list[str]:
        """Takes note of the present phase; the lines of `phase_lines` once after the first step, otherwise none.

        Args:
            now: status of the run; that of an earlier start is ignored.
            first_step: step at which the run started.
        """
        if self.done or now is None or (self.phases and now.since_s < self.phases[-1].begin_s):
            return []
        if now.step > first_step:
            self.done = True
            return phase_lines(self.phases, end_s=now.since_s)
        name = f"{now.actor}: {now.phase}"
        if not self.phases or name != self.phases[-1].name:
            self.phases.append(Phase(name=name, begin_s=now.since_s))
        return []


def phase_lines(phases: Sequence[Phase], *, end_s: float) -> list[str]:
    """The whole time, and a line for each phase. Pure."""
    ends = [*(phase.begin_s for phase in phases[1:]), end_s]
    lines = [f"  {phase.name:<28} {end - phase.begin_s:6.1f} s" for phase, end in zip(phases, ends, strict=True)]
    return [f"from {phases[0].name} to the end of the first step: {end_s - phases[0].begin_s:.1f} s", *lines]
