"""The record of a rehearsal lists every case with its outcome."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT

CASES = """
import pytest

pytestmark = pytest.mark.rehearsal

@pytest.mark.parametrize("name", ["right", "answered by the host", "wrong", "left out"])
def test_a_case(name, record_property):
    record_property("stages", 3)
    record_property("stood_in_for", "cat, attention" if name.startswith("answered") else "")
    assert name != "wrong", "a stage: ValueError: 5 instead of 4"
"""
RUN = """
import json, sys, pytest
from benchmarks.rehearsal import Collector

collector = Collector()
options = ["-q", "-m", "rehearsal", "-k", "not left", "-c", "pyproject.toml", "-p", "no:cacheprovider"]
pytest.main([sys.argv[1], *options], plugins=[collector])
print("\\n" + json.dumps(list(collector.rows.values())))
"""


def test_every_case_has_a_row_with_its_outcome(tmp_path: Path) -> None:
    path = tmp_path / "test_cases.py"
    path.write_text(CASES, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [(row["case"], row["outcome"], row["passed"]) for row in rows] == [
        ("right", "PASS", True),
        ("answered by the host", "stood in for", True),
        ("wrong", "FAIL", False),
        ("left out", "not run", False),
    ]
    assert [row["stood_in_for"] for row in rows] == ["", "cat, attention", "", ""]
    assert rows[2]["fault"] == "a stage: ValueError: 5 instead of 4"
    assert [row["stages"] for row in rows] == [3, 3, 3, 0]
