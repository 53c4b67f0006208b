"""What is refused once the prompts are read, before the history, the engines and the trainer start."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
from ray.exceptions import RayTaskError

from launcher.commands import startup
from launcher.commands.prompts import TrainingPrompts, training_order
from launcher.commands.resume_point import ResumePoint
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.endings.kinds import Ending, judge
from launcher.errors import LaunchError, RunDirectoryError
from launcher.run_dir.console import RunProgress
from megatron_rl.checkpoints.damage import DamagedCheckpointError
from rollout.data.prompts import LoadedPrompts
from rollout.failures import CallError, Place, brief
from rollout.types import Prompt, PromptId


def prompts(*tokens: int) -> TrainingPrompts:
    loaded = tuple(
        Prompt(
            prompt_id=PromptId(f"train/{number}"),
            data_source="train",
            token_ids=np.array([token], dtype=np.int32),
            ground_truth="",
            extra_info_json="null",
        )
        for number, token in enumerate(tokens)
    )
    return TrainingPrompts(files=(LoadedPrompts(name="train", prompts=loaded, num_dropped=0, num_truncated=0),))


def test_a_resume_with_an_edited_prompt_is_refused_before_anything_else_starts_and_edited_answers_are_named(
    write_config: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(RunConfig, write_config(""), ["history.drafts=false"])
    checked = SimpleNamespace(config=config, placement=SimpleNamespace(scorers=()))
    text = SimpleNamespace(text_actor=None, tokenizer=None)
    running = SimpleNamespace(start_text_processes=lambda *given: text)
    started: list[str] = []
    monkeypatch.setattr(startup, "load_evaluation_prompts", lambda *given: {})
    monkeypatch.setattr(startup, "start_history", lambda *given, **named: started.append("history"))
    state = training_order(prompts(1, 2, 3), config.data, seed=config.seed, state=None).state()

    def read(loaded: TrainingPrompts) -> startup.Inputs:
        monkeypatch.setattr(startup, "load_training_prompts", lambda *given, **named: loaded)
        resume = ResumePoint(first_step=1, order=replace(state, cursor=2))
        return startup.read_inputs(checked, running, resume, "run", RunProgress(3))

    with pytest.raises(LaunchError, match=r"other training prompts, .* restore them, or start a new run"):
        read(prompts(1, 2, 4))
    assert started == []
    assert len(read(prompts(1, 2, 3)).training.by_id()) == 3
    assert started == ["history"] and "changed since" not in capsys.readouterr().out
    (file,) = prompts(1, 2, 3).files
    corrected = (*file.prompts[:-1], replace(file.prompts[-1], ground_truth="7"))
    read(TrainingPrompts(files=(replace(file, prompts=corrected),)))
    said = "changed since the checkpoint: ground truths, data_source or extra_info of training prompts train; rewards"
    assert said in capsys.readouterr().out


def test_the_history_knows_the_epochs_before_it_is_filled(
    write_config: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(RunConfig, write_config(""), ["algorithm.prompts_per_step=2"])
    checked = SimpleNamespace(config=config, placement=SimpleNamespace(scorers=()))
    running = SimpleNamespace(start_text_processes=lambda *given: SimpleNamespace(text_actor=None, tokenizer=None))
    calls: list[object] = []
    service = SimpleNamespace(note_epochs=lambda epochs: calls.append([epoch.num_steps for epoch in epochs]))
    monkeypatch.setattr(startup, "load_training_prompts", lambda *given, **named: prompts(1, 2, 3))
    monkeypatch.setattr(startup, "load_evaluation_prompts", lambda *given: {})
    monkeypatch.setattr(startup, "start_history", lambda *given, **named: service)
    monkeypatch.setattr(startup, "fill_history", lambda *given, **named: calls.append("fill"))
    assert startup.read_inputs(checked, running, ResumePoint(), "run", RunProgress(3)).history is service
    assert calls == [[2], "fill"]


def test_prompts_that_share_ids_are_refused_as_input(
    write_config: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(RunConfig, write_config(""), ["data.train=[{path: a.jsonl}, {path: b.jsonl}]"])
    checked = SimpleNamespace(config=config, placement=SimpleNamespace(scorers=()))
    text = SimpleNamespace(text_actor=None, tokenizer=None)
    twice = TrainingPrompts(files=prompts(1).files * 2)
    monkeypatch.setattr(startup, "load_training_prompts", lambda *given, **named: twice)
    running = SimpleNamespace(start_text_processes=lambda *given: text)
    with pytest.raises(LaunchError, match="'train/0' occurs twice; give every data set its own name"):
        startup.read_inputs(checked, running, ResumePoint(), "run", RunProgress(3))


def load_that_fails(monkeypatch: pytest.MonkeyPatch, cause: Exception, checkpoint: Path) -> None:
    """Start a trainer whose ranks cannot load a checkpoint, as Ray tells it."""
    remote = RayTaskError("load", "the traceback of the rank", cause).as_instanceof_cause()

    def load_checkpoint(path: str) -> NoReturn:
        raise CallError(f"trainer.load failed: {brief(remote)}", Place(role="trainer")) from remote

    monkeypatch.setattr(startup, "trainer_spec", lambda *given, **named: None)
    checked = SimpleNamespace(config=None, format=None, placement=SimpleNamespace(trainers=(), declines_delta=None))
    running = SimpleNamespace(start_trainer=lambda *given: SimpleNamespace(load=load_checkpoint))
    resume = ResumePoint(first_step=int(checkpoint.name), trainer=str(checkpoint / "trainer"))
    startup.start_trainer(checked, running, resume, "run")


@pytest.mark.parametrize("earlier", [[], [10]])
def test_a_damaged_checkpoint_of_the_trainer_is_an_error_of_the_run_directory_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, earlier: list[int]
) -> None:
    for step in (*earlier, 20):
        (tmp_path / str(step)).mkdir()
    advice = "remove that folder and write 10 into" if earlier else "no checkpoint before it is left"
    said = rf"^checkpoint {tmp_path}/20 cannot be used: common\.pt is damaged; {advice}"
    with pytest.raises(RunDirectoryError, match=said):
        load_that_fails(monkeypatch, DamagedCheckpointError("common.pt is damaged"), tmp_path / "20")


def test_a_checkpoint_of_another_configuration_is_an_error_of_the_run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RunDirectoryError, match=r"it was saved with bf16$"):
        load_that_fails(monkeypatch, ValueError("it was saved with bf16"), tmp_path / "20")


@pytest.mark.parametrize(
    ("cause", "ending"),
    [
        (OSError(errno.ESTALE, "Stale file handle", "common.pt"), Ending.UNWRITABLE),
        (OSError(errno.EIO, "Input/output error", "common.pt"), Ending.UNWRITABLE),
        (PermissionError(errno.EACCES, "Permission denied", "common.pt"), Ending.NOT_PERMITTED),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out", "common.pt"), Ending.DEFECT),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), Ending.OUT_OF_MEMORY),
        (MemoryError("none left"), Ending.OUT_OF_MEMORY),
    ],
)
def test_an_error_of_a_load_that_may_pass_does_not_blame_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cause: Exception, ending: Ending
) -> None:
    with pytest.raises(CallError) as caught:
        load_that_fails(monkeypatch, cause, tmp_path / "20")
    assert judge(caught.value).ending is ending
