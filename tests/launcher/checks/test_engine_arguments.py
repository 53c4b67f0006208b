"""Arguments of vLLM's engine are checked in another process; scripts stand in for it, but in the last test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.checks import engine_arguments as module
from launcher.checks.check import check_eval, check_run
from launcher.checks.engine_arguments import engine_arguments, run_arguments
from launcher.cli import main
from launcher.cluster.node import NodeResources
from launcher.config.loading import load
from launcher.config.schema import EvalConfig, RunConfig
from launcher.errors import ConfigError
from rollout.config import EngineConfig

Write = Callable[[str], Path]
ONE_PROBLEM = "print('a line of vLLM'); print('[\"engine.vllm.x is no argument\"]')"


@pytest.fixture(autouse=True)
def forgotten() -> None:
    module._asked.cache_clear()


def answer(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(module, "ARGUMENT_CHECK", ("-c", code))


def test_a_problem_refuses_runs_and_evaluations(
    write_config: Write, model_dir: Path, tmp_path: Path, node: NodeResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, ONE_PROBLEM)
    with pytest.raises(ConfigError, match=r"engine\.vllm\.x is no argument"):
        check_run(load(RunConfig, write_config(""), ["engine.vllm.x=1"]), [node])
    one = {"path": str(tmp_path / "train.jsonl"), "max_response_tokens": 64}
    config = {"model": str(model_dir), "sets": {"a": one}, "max_prompt_tokens": 64, "engine": {"vllm": {"x": 1}}}
    with pytest.raises(ConfigError, match=r"engine\.vllm\.x is no argument"):
        check_eval(EvalConfig.model_validate(config))


def test_a_table_is_asked_about_once_and_an_empty_one_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, f"print('[]'); open({str(tmp_path / 'asked')!r}, 'a').write('once ')")
    assert engine_arguments(EngineConfig()) == ([], [])
    assert not (tmp_path / "asked").exists()
    for _ in range(2):
        assert engine_arguments(EngineConfig(vllm={"x": 1})) == ([], [])
    assert (tmp_path / "asked").read_text() == "once "


def test_a_machine_without_vllm_gives_a_warning(
    write_config: Write, node: NodeResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "raise ImportError('no vllm')")
    warning = "`engine.vllm` is not checked, because vLLM cannot be imported here: ImportError: no vllm"
    assert warning in check_run(load(RunConfig, write_config(""), ["engine.vllm.x=1"]), [node]).warnings


def test_the_vllm_of_a_container_may_know_more(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ONE_PROBLEM)
    container = [f"cluster.slurm.container.{setting}" for setting in ("kind=pyxis", "image=ours")]
    config = load(RunConfig, write_config(""), ["engine.vllm.x=1", *container])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    problems, (warning,) = run_arguments(config)
    assert problems == [] and warning.startswith("engine.vllm.x is no argument (of this machine's vLLM")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert run_arguments(config) == (["engine.vllm.x is no argument"], [])


@pytest.mark.slow
def test_a_typing_error_is_refused_with_the_nearest_argument_before_anything_starts(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(write_config("")), "engine.vllm.block_siz=32", "--dry-run"]) == 2
    refused = capsys.readouterr().err
    assert "engine.vllm.block_siz is no argument of vLLM's engine; did you mean 'block_size'?" in refused
