"""Both samplers run on the same logits, in a process like an engine's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.processes import ProcessEnv
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT


@pytest.mark.slow
@pytest.mark.bench
def test_both_samplers_are_measured_with_and_without_drafts(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "benchmarks.rollout.sampling", f"--json={record}", "--quick"]
    environment = os.environ | ProcessEnv(single_node=True).engine(threads=1)
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    methods = {(row["requests"], row["drafts"]): set() for row in rows}
    for row in rows:
        methods[row["requests"], row["drafts"]].add(row["method"])
        assert row["seconds"] > 0
    assert methods[8, "none"] == {"ours", "vllm", "vllm stock"}
    assert methods[1, "one each, one of 16"] == methods[8, "four each"] == {"ours", "vllm"}
