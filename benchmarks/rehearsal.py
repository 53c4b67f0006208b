"""Rehearses GPU code on stub devices, in the environment of GPU machines, and records each case: `make rehearse`.

The cases are the tests of `tests/rehearsal`, one row each. Kernels do nothing there, so a case that passes shows
control flow, devices, dtypes and allocations, and no number.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.harness.record import Goal, Row, arguments, write

REHEARSED = (
    *("rollout.engine.actor", "rollout.worker.worker", "rollout.worker.proposer", "rollout.transports.cuda_ipc"),
    *("megatron_rl.trainer.actor", "megatron_rl.quantization.te_kernel", "launcher.commands.run", "launcher.cli"),
)
"""Modules whose code the cases run, with all that they import; `make records` says which have changed since."""
FOLDER = Path(__file__).parents[1] / "tests" / "rehearsal"
NOT_REHEARSED = (
    *("any number or speed", "more than four devices, except in configurations", "several nodes"),
    *("kernels of experts", "deltas over NCCL, which kernels compute"),
)


class Collector:
    """Takes a row from each finished test."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest after each phase of a test."""
        if report.when != "call":
            return
        name = report.nodeid.partition("[")[2].removesuffix("]")
        fault = "" if report.passed else str(report.longrepr).rpartition("AssertionError: ")[2].partition("\n")[0][:300]
        self.rows.append(
            {
                "case": name,
                "passed": report.passed,
                "stages": int(str(dict(report.user_properties).get("stages", 0))),
                "fault": fault,
                "seconds": round(report.duration, 1),
            }
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and write the record; the exit code is 1 if one fails."""
    parser = arguments("GPU code on stub devices.")
    parser.add_argument("--only", default="", help="cases whose name this expression of pytest's -k selects")
    options = parser.parse_args(argv)
    chosen = options.only or ("imports" if options.quick else "")
    collector = Collector()
    pytest.main([str(FOLDER), "-q", "-m", "rehearsal", *(["-k", chosen] if chosen else [])], plugins=[collector])
    if not collector.rows:
        print("no case has run; run `make rehearse`", file=sys.stderr)
        return 1
    passed = [bool(row["passed"]) for row in collector.rows]
    goal = Goal(
        name="cases that pass",
        value=sum(passed) / len(passed),
        bound=1.0,
        direction="at least",
        unit="share of the cases",
    )
    write(options.json, rows=collector.rows, goals=[goal], not_measured=NOT_REHEARSED)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
