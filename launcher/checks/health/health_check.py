"""A check by name, and the function that runs a list of them; an error of a check becomes its line."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launcher.checks.preflight import Check
from rollout.failures import RewardBrokenError


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """One line of the doctor."""

    name: str
    measure: Callable[[], tuple[str, list[str]]]
    """Returns the value as measured, and the problems with their fixes; no problem for a healthy subject."""

    def run(self) -> Check:
        """The line of this check."""
        try:
            value, problems = self.measure()
        # bad input, a full or missing disk, a missing package, a reward function that cannot be imported
        except (ValueError, OSError, ImportError, RewardBrokenError) as error:
            return Check(name=self.name, value="cannot be checked", problem=f"{type(error).__name__}: {error}")
        return Check(name=self.name, value=value, problem="; ".join(problems))


def run_checks(checks: Sequence[HealthCheck]) -> Iterator[Check]:
    """Lines in order, each as soon as its check has ended."""
    for check in checks:
        yield check.run()
