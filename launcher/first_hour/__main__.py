"""`python -m launcher.first_hour --out DIR [--minutes 30]`: what a GPU is asked first, in a checkout of the project.

Exit codes: 0 all stages have passed, 1 a stage failed, 2 the command cannot start, 3 stages are left for another call.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.first_hour.results import ALL
from launcher.first_hour.runner import run
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
    names = [stage.name for stage in STAGES]
    parser.add_argument("--again", nargs="+", default=[], choices=names, help="stages to run although they have passed")
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="stages to run beside the first one")
    options = parser.parse_args(argv)
    missing = [name for name in ("tests", "benchmarks") if not (ROOT / name).is_dir()]
    if missing:
        print(f"{ROOT} has no {' and no '.join(missing)}: run this command in a checkout", file=sys.stderr)
        return 2
    if options.minutes <= 0:
        print(f"--minutes is {options.minutes:g}, but must be above 0", file=sys.stderr)
        return 2
    stages = [stage for number, stage in enumerate(STAGES) if not number or stage.name in options.only]
    results = run(stages, options.out, root=ROOT, minutes=options.minutes, again=options.again)
    print(f"results: {options.out / ALL}")
    if results and results[0].stage == STAGES[0].name and results[0].outcome != "passed":
        return 2
    if any(result.outcome == "failed" for result in results):
        return 1
    return 0 if len(results) == len(stages) and all(each.outcome == "passed" for each in results) else 3


if __name__ == "__main__":
    sys.exit(main())
