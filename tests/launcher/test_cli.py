import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import cli
from launcher.checks.health.wandb import KEYS, PLACES
from launcher.cli import main
from launcher.cluster.node import NodeResources
from launcher.config.schema import ExportConfig
from tests.support.deadline import DEADLINE_S

Write = Callable[[str], Path]
HEAVY = ("torch", "ray", "vllm", "megatron", "wandb", "matplotlib", "transformers")
REPORT_HEAVY = (
    "import json, sys\n"
    "from launcher.cli import main\n"
    "try:\n"
    "    code = main(sys.argv[1:])\n"
    "except SystemExit as done:\n"
    "    code = done.code\n"
    f"print(json.dumps([code, [name for name in {HEAVY} if name in sys.modules]]))\n"
)

RAY_PRINTS = (
    "from launcher.cli import main\n"
    "main(['run', 'missing.yaml'])\n"
    "from ray._private.worker import print_to_stdstream\n"
    "death = 'A worker died or was killed while executing a task by an unexpected system error.'\n"
    "for line in (death, 'another message'):\n"
    "    print_to_stdstream({'lines': [line], 'pid': 'raylet', 'is_err': False}, ignore_prefix=False)\n"
)
"""Ray's driver prints messages of the cluster by this function, whatever `log_to_driver` is."""


def run_apart(*arguments: str) -> tuple[int, list[str], str, str]:
    """Exit code, imported heavy modules, standard output and error of a command in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT_HEAVY, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    *lines, last = done.stdout.splitlines()
    code, imported = json.loads(last)
    return code, imported, "\n".join(lines), done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["slurm", "--help"], ["export", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code, imported, out, _ = run_apart(*arguments)
    assert (code, imported) == (0, [])
    assert "usage: megatron-rl" in out


def test_a_dry_run_prints_configuration_placement_and_memory_and_starts_no_process(write_config: Write) -> None:
    path = write_config("engine:\n  format: int8\n")
    code, imported, out, _ = run_apart("run", str(path), "--dry-run", "trainer.parallel.tensor=2")
    assert (code, imported) == (0, [])
    assert "format: int8" in out
    assert "tensor: 2" in out
    assert "trainer 1: tp 1 pp 0 dp 0" in out
    assert "engine 0: 1 rank(s)" in out
    assert "host of a node: controller + trainer + engines (x 1)" in out


def test_a_refusal_is_one_screen_without_traceback_and_before_any_heavy_import(write_config: Write) -> None:
    code, imported, out, error = run_apart("run", str(write_config("lr: 3\n")), "sampling.top_p=0.5")
    assert (code, imported) == (2, [])
    assert "unknown key `lr`" in error
    assert "Traceback" not in error + out
    assert len(error.splitlines()) < 24


def test_overrides_are_accepted_before_and_after_options(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(write_config("")), "seed=5", "--dry-run", "num_steps=9"]) == 0
    out = capsys.readouterr().out
    assert "seed: 5" in out
    assert "num_steps: 9" in out


def test_an_online_run_without_a_key_is_refused_before_anything_starts(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*KEYS, *PLACES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    begun: list[object] = []
    monkeypatch.setattr("launcher.commands.run.run", lambda checked, command: begun.append(checked))
    command = ["run", str(write_config("")), "wandb.mode=online"]
    assert main(command) == 2
    assert "`wandb.mode` = online: no key; set WANDB_API_KEY" in capsys.readouterr().err
    assert not begun and not (tmp_path / "run").exists()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert main(command) == 0
    assert len(begun) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "x.yaml", "--drye"],
        ["run", "x.yaml", "--dry-run", "nonsense"],
        ["export", "a", "--steps=1"],
        ["status", "a", "seed=1"],
        ["stop", "a", "b"],
        [],
    ],
)
def test_unknown_arguments_are_refused_with_code_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert "usage: megatron-rl" in capsys.readouterr().err


def test_an_export_takes_overrides_of_the_trainer_and_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[ExportConfig] = []
    monkeypatch.setattr("launcher.commands.export.export", exported.append)
    overrides = ["trainer.parallel.pipeline=1", "cluster.address=auto"]
    assert main(["export", "run", "out", overrides[0], "--step", "3", overrides[1]]) == 0
    assert exported == [ExportConfig(run_dir="run", output_dir="out", step=3, overrides=tuple(overrides))]


@pytest.mark.parametrize("override", ["seed=1", "model=x", "trainer={}"])
def test_an_export_refuses_overrides_of_other_keys(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "out", "trainer.parallel.pipeline=1", override]) == 2
    error = capsys.readouterr().err
    assert f"override `{override}`: an export takes keys of `trainer.` and `cluster.` only" in error


def test_a_missing_configuration_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "nowhere.yaml"]) == 2
    assert "no configuration file `nowhere.yaml`" in capsys.readouterr().err


def test_a_command_prints_messages_of_ray_but_not_that_a_worker_died() -> None:
    done = subprocess.run([sys.executable, "-c", RAY_PRINTS], capture_output=True, text=True, timeout=DEADLINE_S)
    assert "another message" in done.stdout and "worker died" not in done.stdout + done.stderr, done.stderr


def test_a_job_in_a_container_is_not_refused_for_scores_that_its_packages_may_save(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = "cluster:\n  slurm: {nodes: 1, gpus_per_node: 8, gpu: a100}\n"
    path = str(write_config(f"{slurm}trainer: {{max_micro_batch_tokens: 1000000, dtype: bf16}}\n"))
    command = ["slurm", path, "--dry-run", "placement.mode=disaggregated"]
    assert main(command) == 2
    assert "`trainer.recompute` = selective frees " in capsys.readouterr().err
    image = ["cluster.slurm.container.kind=pyxis", "cluster.slurm.container.image=/images/rl.sqsh"]
    assert main([*command, *image]) == 0
    shown = capsys.readouterr()
    assert "attention scores" not in shown.out
    assert "packages of the container are unknown here, so no scores are counted" in shown.err


def test_a_warm_start_shows_its_warnings(
    tmp_path: Path,
    model_dir: Path,
    node: NodeResources,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ampere = replace(node, gpu_bytes=(80 << 30,), gpu_capability=(8, 0))
    monkeypatch.setattr(cli, "_nodes", lambda cluster: [ampere])
    monkeypatch.setattr(cli, "machine_problems", lambda cluster: [])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"model: {model_dir}\noutput_dir: {tmp_path / 'out'}\nnum_steps: 1\n"
        f"data: {{path: {tmp_path / 'rows.jsonl'}, max_tokens: 64}}\n"
    )
    assert main(["sft", str(config), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "attention scores" in shown.out
    assert "warning: " in shown.err and "`flash-attn`" in shown.err
