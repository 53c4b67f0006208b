"""GPUs of a job before it has its nodes: those that the configuration names, never those of a login node."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import cli
from launcher.checks.expected_nodes import expected_nodes, job_gpu
from launcher.cli import main
from launcher.cluster.node import JobGpu, NodeResources
from launcher.config.slurm import SlurmConfig

Write = Callable[[str], Path]
T4 = NodeResources(cpu_cores=64, available_bytes=1 << 36, gpu_bytes=(15360 << 20,), gpu_capability=(7, 5))
LARGE_CACHE = "engine.kv_cache_bytes=107374182400"
"""100 GiB: too much for a GPU of 80 GB, not for one of 141."""
JOB = "cluster:\n  slurm:\n    nodes: 2\n    gpus_per_node: 8\n"


@pytest.fixture(autouse=True)
def on_a_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(cli, "node_resources", lambda: T4)


def test_gpus_of_a_login_node_never_count(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = expected_nodes(SlurmConfig(nodes=2, gpus_per_node=8), T4)
    assert [(node.name, node.gpu_bytes, node.gpu_capability) for node in nodes] == [
        ("node 1", (80_998 << 20,) * 8, None),
        ("node 2", (80_998 << 20,) * 8, None),
    ]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (node,) = expected_nodes(SlurmConfig(gpus_per_node=1), T4)
    assert (node.gpu_bytes, node.gpu_capability) == (T4.gpu_bytes, (7, 5))
    (node,) = expected_nodes(SlurmConfig(cpus_per_node=32), T4)
    assert (node.cpu_cores, node.gpu_bytes, node.gpu_capability) == (32, (), None)


def test_gpus_of_a_login_node_do_not_count_in_a_shell_of_salloc_either(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[05-08]", "SLURMD_NODENAME": "gpu05"}.items():
        monkeypatch.setenv(name, value)
    slurm = SlurmConfig(gpus_per_node=1)
    assert expected_nodes(slurm, T4)[0].gpu_bytes == T4.gpu_bytes
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "login1")
    assert expected_nodes(slurm, T4)[0].gpu_bytes == (80_998 << 20,)


@pytest.mark.parametrize("in_allocation", [False, True])
def test_a_named_kind_counts_everywhere(in_allocation: bool) -> None:
    gpu = job_gpu(SlurmConfig(gpus_per_node=8, gpu="h200"), T4, in_allocation=in_allocation)
    assert gpu == JobGpu(memory_bytes=143_073 << 20, capability=(9, 0))


def test_a_run_for_larger_gpus_is_submitted_if_they_are_named(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_config(JOB))
    assert main(["slurm", path, "--dry-run", LARGE_CACHE]) == 2
    error = capsys.readouterr().err
    assert (
        "warning: GPUs of the job are taken to be of 80 GB; `cluster.slurm.gpu` names their kind: a100, h100" in error
    )
    assert "but 79.10 GiB are available" in error
    assert main(["slurm", path, "--dry-run", LARGE_CACHE, "cluster.slurm.gpu=h200"]) == 0
    assert capsys.readouterr().err == ""


def test_a_t4_in_the_login_node_refuses_no_job(write_config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", str(write_config(JOB)), "--dry-run", "engine.kv_cache_bytes=34359738368"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_job_without_gpus_has_no_warning(write_config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", str(write_config("cluster: {slurm: {nodes: 2}}\n")), "--dry-run"]) == 0
    assert "GPU" not in capsys.readouterr().err


def test_an_unknown_kind_is_refused_with_the_known_ones(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", str(write_config(JOB)), "--dry-run", "cluster.slurm.gpu=h20"]) == 2
    error = capsys.readouterr().err
    assert "`cluster.slurm.gpu`" in error and "'a100', 'h100', 'h200' or 'b200'" in error
