import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from launcher.cluster import node as environment


def test_the_description_is_json_with_versions_and_machine() -> None:
    described = json.loads(json.dumps(environment.describe()))
    assert described["packages"]["ray"] == "2.60.0"
    assert described["machine"]["total_bytes"] == psutil.virtual_memory().total
    assert len(described["commit"]) in (0, 40, 41)


def test_a_commit_is_marked_for_changed_code_and_not_for_results_of_benchmarks(tmp_path: Path) -> None:
    assert environment.source_commit(tmp_path) == "", "no checkout"
    code, results = tmp_path / "code.py", tmp_path / "benchmarks" / "results" / "record.json"
    results.parent.mkdir(parents=True)
    code.write_text("1")
    results.write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        subprocess.run([*git, *command], check=True)
    head = environment.source_commit(tmp_path)
    assert len(head) == 40
    results.write_text("2")
    assert environment.source_commit(tmp_path) == head
    code.write_text("2")
    assert environment.source_commit(tmp_path) == f"{head}+"


def test_resources_are_those_that_this_process_may_use() -> None:
    node = environment.node_resources()
    assert node.cpu_cores == len(os.sched_getaffinity(0))
    assert 0 < node.available_bytes <= psutil.virtual_memory().total


def test_devices_come_from_the_driver_and_are_limited_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81559, 480\necho 81559, 480\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.node_resources().gpu_bytes == (85_017_493_504,) * 2
    assert environment.node_resources().gpu_ids == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert environment.node_resources().gpu_bytes == (85_017_493_504,)
    assert environment.node_resources().gpu_ids == ("1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.node_resources().gpu_bytes == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool.write_text("#!/bin/sh\necho '81559, [N/A]'\n")
    assert environment.node_resources().gpu_bytes == ((81559 - 871) << 20,)
