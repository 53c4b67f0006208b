"""Names in `reward.environment` without a value are refused before anything starts, and reach a SLURM job."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.checks.health.reward import reward_line
from launcher.checks.health.reward_environment import job_reward_problems, reward_problems, unset_problems
from launcher.cli import main
from launcher.commands.slurm import job_config, prepare
from launcher.config.loading import load
from launcher.config.schema import ClusterConfig, RunConfig
from launcher.config.slurm import ContainerConfig, SlurmConfig
from rollout.config import RewardConfig
from rollout.data.rows import read_rows

KEY = "MEGATRON_RL_TEST_JUDGE_KEY"
REWARD = RewardConfig(environment=("HOME", KEY))
SAID = f"`reward.environment` names {KEY}, which is not set here; export it, or remove the name"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setenv("HOME", "/home/user")


def test_a_name_without_a_value_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unset_problems(REWARD) == reward_problems(REWARD, ClusterConfig()) == [SAID]
    assert reward_problems(REWARD, ClusterConfig(address="auto")) == [], "Ray's processes have variables of their own"
    monkeypatch.setenv(KEY, "")
    assert unset_problems(REWARD) == []


def test_a_job_may_have_variables_from_elsewhere() -> None:
    assert job_reward_problems(REWARD, SlurmConfig()) == [SAID]
    container = ContainerConfig(kind="pyxis", image="image.sqsh")
    for slurm in (
        SlurmConfig(container=container),
        SlurmConfig(modules=("keys",)),
        SlurmConfig(template="own.sh"),
        SlurmConfig(extra=("--export-file=keys",)),
    ):
        assert job_reward_problems(REWARD, slurm) == []


@pytest.mark.parametrize("command", [["run", "--dry-run"], ["slurm", "--dry-run"]])
def test_run_and_slurm_refuse_it(
    command: list[str],
    write_config: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = [*command, str(write_config("")), f"reward.environment=[{KEY}]"]
    assert main(line) == 2
    assert SAID in capsys.readouterr().err
    monkeypatch.setenv(KEY, "secret")
    main(line)
    text = "".join(capsys.readouterr())
    assert "which is not set here" not in text and "secret" not in text


def test_eval_refuses_it(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "eval.yaml"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    config.write_text(json.dumps({"model": str(model_dir), "sets": {"a": {"path": str(rows)}}}))
    assert main(["eval", str(config), f"reward.environment=[{KEY}]"]) == 2
    assert SAID in capsys.readouterr().err


def test_the_doctor_does_not_call_a_function_without_its_variables(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    assert reward_line(REWARD, read_rows(str(rows))) == ("not called", [SAID])


def test_a_job_receives_the_variables_by_name_only(
    write_config: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "secret")
    script = prepare(job_config(load(RunConfig, write_config(""), [f"reward.environment=[{KEY}]"])))[1]
    (line,) = [line for line in script.splitlines() if "--export=" in line]
    assert line.endswith(f",{KEY}") and "secret" not in script
    assert main(["slurm", "--dry-run", str(write_config("")), f"reward.environment=['{KEY}=secret']"]) == 2
    assert "is no variable name; give names only, values come from the shell" in capsys.readouterr().err
