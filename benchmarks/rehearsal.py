"""Rehearses GPU code on stub devices, in the environment of GPU machines, and records each case: `make rehearse`.

The cases are the tests of `tests/rehearsal`, one row each: PASS, FAIL, or "stood in for", with the operations for which
the host answered (`tests/support/stub_cuda/stand_ins.py`). Kernels do nothing there, so a case that passes shows
control flow, devices, dtypes and allocations, and no number. Where a name begins with "numbers", the host's kernels
compute.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.harness.record import Goal, Row, arguments, rows_before, write

REHEARSED = (
    *("rollout.engine.actor", "rollout.worker.worker", "rollout.worker.proposer", "rollout.transports.cuda_ipc"),
    *("megatron_rl.trainer.actor", "megatron_rl.quantization.te_kernel", "launcher.commands.run", "launcher.cli"),
)
"""Modules whose code the cases run, with all that they import; `make records` says which have changed since."""
FOLDER = Path(__file__).parents[1] / "tests" / "rehearsal"
NOT_REHEARSED = (
    *(
        "speed, races, and numbers of kernels for devices",
        "more than eight devices",
        "several nodes",
    ),
    *(
        "engines with experts in int8 and fp8_block, except in configurations",
        "deltas over NCCL, which kernels compute",
    ),
)


class Collector:
    """Takes a row for each case; a case that does not run has one too."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Called by pytest for each test, before it chooses."""
        if item.get_closest_marker("rehearsal"):
            self.rows[_case(item.nodeid)] = _row(_case(item.nodeid), "not run")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest after each phase of a test."""
        if report.when != "call" and report.passed:
            return
        known = dict(report.user_properties)
        fault = "" if report.passed else str(report.longrepr).rpartition("AssertionError: ")[2].partition("\n")[0][:300]
        stood_in_for = str(known.get("stood_in_for", ""))
        outcome = ("stood in for" if stood_in_for else "PASS") if report.passed else "FAIL"
        self.rows[_case(report.nodeid)] = {
            **_row(_case(report.nodeid), outcome),
            "passed": report.passed,
            "stages": int(str(known.get("stages", 0))),
            "stood_in_for": stood_in_for,
            "fault": fault,
            "seconds": round(report.duration, 1),
        }


def _case(test: str) -> str:
    return test.partition("[")[2].removesuffix("]")


def _row(case: str, outcome: str) -> Row:
    return {
        **{"case": case, "outcome": outcome, "passed": False, "stages": 0},
        **{"stood_in_for": "", "fault": "", "seconds": 0.0},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and write the record; the exit code is 1 if one fails."""
    parser = arguments("GPU code on stub devices.")
    parser.add_argument("--only", default="", help="cases whose name this expression of pytest's -k selects")
    parser.add_argument("--resume", action="store_true", help="keep the record's rows of cases that are not selected")
    options = parser.parse_args(argv)
    chosen = options.only or ("imports" if options.quick else "")
    collector = Collector()
    pytest.main([str(FOLDER), "-q", "-m", "rehearsal", *(["-k", chosen] if chosen else [])], plugins=[collector])
    ran = [row for row in collector.rows.values() if row["outcome"] != "not run"]
    if not ran:
        print("no case has run; run `make rehearse`", file=sys.stderr)
        return 1
    before = {row["case"]: row for row in rows_before(options.json, resume=options.resume)}
    rows = [row if row in ran else before.get(case, row) for case, row in collector.rows.items()]
    passed = [bool(row["passed"]) for row in rows]
    for row in rows:
        print(f"{row['outcome']:12} {row['case']}: {row['stages']} stages {row['stood_in_for'] or row['fault']}")
    goal = Goal(
        name="cases that pass",
        value=sum(passed) / len(passed),
        bound=1.0,
        direction="at least",
        unit="share of the cases",
    )
    write(options.json, rows=rows, goals=[goal], not_measured=NOT_REHEARSED)
    return 0 if all(row["passed"] for row in (ran if chosen else rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
