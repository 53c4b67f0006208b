"""Tests that are marked `gpu`, whose assertions hold although no kernel computes: `tests_case PATH EXPRESSION`."""

import sys

import pytest

from tests.rehearsal.stages import stage


class Counter:
    """Counts tests that have passed."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def run(path: str, expression: str) -> None:
    counter = Counter()
    code = pytest.main(["-q", "-m", "gpu", "-k", expression, "-p", "no:cacheprovider", path], plugins=[counter])
    assert code == 0 and counter.passed, f"exit code {code}, {counter.passed} passed"


def main(path: str, expression: str) -> None:
    stage(f"{path}: {expression}", lambda: run(path, expression))


if __name__ == "__main__":
    main(*sys.argv[1:])
