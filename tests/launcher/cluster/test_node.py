import json
import os
import re
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


FOUR_GPUS = """#!/bin/sh
echo 0, GPU-aa0, 24564, 400, 8.6
echo 1, GPU-ab1, 81559, 480, 9.0
echo 2, GPU-ac2, 40960, '[N/A]', 8.0
echo 3, GPU-ac3, 81559, 480, 9.0
"""
SIZES = tuple(megabytes << 20 for megabytes in (24564 - 400, 81559 - 480, 40960 - 871, 81559 - 480))


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(FOUR_GPUS)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("four_gpus")
def test_devices_come_from_the_driver() -> None:
    node = environment.node_resources()
    assert (node.gpu_bytes, node.gpu_ids, node.gpu_capability) == (SIZES, (), (8, 0))


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("named", "gpus", "ids"),
    [
        ("1", [1], ("1",)),
        ("3, 0", [3, 0], ("3", "0")),
        ("GPU-ac3,GPU-aa", [3, 0], ("GPU-ac3", "GPU-aa0")),
        ("2,GPU-ab1", [2, 1], ("2", "GPU-ab1")),
        ("", [], ()),
        ("-1", [], ()),
        ("NoDevFiles", [], ()),
        ("none", [], ()),
        ("1,-1,0", [1], ("1",)),
        ("1,4,0", [1], ("1",)),
        ("1,GPU-ff,0", [1], ("1",)),
        ("GPU-ac", [], ()),
    ],
)
def test_the_environment_names_devices_as_for_cuda(
    monkeypatch: pytest.MonkeyPatch, named: str, gpus: list[int], ids: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    node = environment.node_resources()
    assert node.gpu_bytes == tuple(SIZES[gpu] for gpu in gpus)
    assert node.gpu_ids == ids
    assert node.gpu_capability == min((((8, 6), (9, 0), (8, 0), (9, 0))[gpu] for gpu in gpus), default=None)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("named", "said"), [("MIG-11-22", "MIG-11-22 is a part"), ("1,0,1", "GPU 1 twice"), ("1,GPU-ab1", "GPU 1 twice")]
)
def test_parts_of_devices_and_devices_named_twice_are_no_devices_and_are_named(
    monkeypatch: pytest.MonkeyPatch, named: str, said: str
) -> None:
    """They do not end a command that only counts the cores here, such as `slurm`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    node = environment.node_resources()
    assert re.search(f"CUDA_VISIBLE_DEVICES = {named}.*{said}", node.gpu_problem)
    assert node.gpu_bytes == node.gpu_ids == () and node.cpu_cores
