"""Runs the code example from data to report: the phases of `examples.arithmetic.quickstart`.

Model and tokenizer are those of the arithmetic example. Programs are run by `rollout.rewards.sandbox`, which needs
bubblewrap.
"""

import sys
from pathlib import Path

from examples.arithmetic.quickstart import main
from launcher.checks.preflight import Check, machine_checks
from rollout.rewards.sandbox import isolation_problem

EXAMPLE = Path("examples/code")


def checks(work: Path) -> list[Check]:
    """Checks of the machine, and whether programs can be isolated on it."""
    return [*machine_checks(work), Check(name="sandbox", value="bubblewrap", problem=isolation_problem())]


if __name__ == "__main__":
    sys.exit(main(example=EXAMPLE, checks=checks))
