"""What is refused once the prompts are read, before the history, the engines and the trainer start."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest

from launcher.commands import startup
from launcher.commands.prompts import TrainingPrompts, training_order
from launcher.commands.resume_point import ResumePoint
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.errors import LaunchError, RunDirectoryError
from launcher.run_dir.console import RunProgress
from rollout.data.prompts import LoadedPrompts
from rollout.failures import CallError, Place
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


@pytest.mark.parametrize(
    ("cause", "kind"), [(ValueError("a tensor is damaged"), RunDirectoryError), (MemoryError("none left"), CallError)]
)
def test_a_damaged_checkpoint_of_the_trainer_is_an_error_of_the_run_directory(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, kind: type[Exception]
) -> None:
    def load_checkpoint(path: str) -> NoReturn:
        raise CallError(f"trainer.load failed: {cause}", Place(role="trainer")) from cause

    monkeypatch.setattr(startup, "trainer_spec", lambda *given, **named: None)
    checked = SimpleNamespace(config=None, format=None, placement=SimpleNamespace(trainers=(), declines_delta=None))
    running = SimpleNamespace(start_trainer=lambda *given: SimpleNamespace(load=load_checkpoint))
    with pytest.raises(kind, match=f"trainer.load failed: {cause}"):
        startup.start_trainer(checked, running, ResumePoint(first_step=1, trainer="checkpoints/1/trainer"), "run")
