"""`python -m launcher.first_hour --out DIR [--minutes 30]`: what a GPU is asked first, in a checkout of the project.

Exit codes: 0 all stages have passed, 1 a stage failed, 2 the command cannot start, 3 stages are left for another call,
130 interrupted, 143 terminated. A call that is interrupted or terminated ends its stages.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.endings.conclusion import termination_raises
from launcher.endings.kinds import Ending
from launcher.errors import Terminated
from launcher.first_hour.results import ALL
from launcher.first_hour.runner import FirstHour
from launcher.first_hour.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m launcher.first_hour",
        description="Runs what a GPU is asked first, in order of what it decides. Call it again to go on.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results, logs and records")
    parser.add_argument("--minutes", type=float, default=30.0, help="time of this call")
    parser.add_argument(
        "--beside",
        type=int,
        default=1,
        metavar="N",
        help="most stages at a time, where neither durations nor free memory are measured; each takes two cores and "
        "4 GiB of the device",
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--only", nargs="+", choices=names, help="run these, passed or not, and no others but the first"
    )
    options = parser.parse_args(argv)
    missing = [name for name in ("tests", "benchmarks") if not (ROOT / name).is_dir()]
    if missing:
        print(f"{ROOT} has no {' and no '.join(missing)}: run this command in a checkout", file=sys.stderr)
        return 2
    if options.minutes <= 0:
        print(f"--minutes is {options.minutes:g}, but must be above 0", file=sys.stderr)
        return 2
    if options.beside < 1:
        print(f"--beside is {options.beside}, but must be at least 1", file=sys.stderr)
        return 2
    hour = FirstHour(stages=STAGES, folder=options.out, root=ROOT, num_beside=options.beside)
    try:
        with termination_raises():
            results = hour.run(minutes=options.minutes, only=options.only)
    except (KeyboardInterrupt, Terminated) as error:
        ending = Ending.TERMINATED if isinstance(error, Terminated) else Ending.INTERRUPTED
        print(f"{ending.title}: the stages were ended; the same command goes on from here", file=sys.stderr)
        return ending.code
    print(f"results: {options.out / ALL}")
    outcomes = [result.outcome for result in results]
    if outcomes[:1] != ["passed"]:
        return 2
    if "failed" in outcomes:
        return 1
    wanted = {STAGES[0].name, *(options.only or names)}
    return 0 if len(results) == len(wanted) and set(outcomes) == {"passed"} else 3


if __name__ == "__main__":
    sys.exit(main())
