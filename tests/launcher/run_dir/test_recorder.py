"""Evaluations reach wandb: with the step of the same number, the last one on its own."""

from pathlib import Path

import numpy as np
import pytest
import ray

from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.recorder import RunRecorder
from launcher.run_dir.saves import Saves
from launcher.run_dir.status import StatusFile
from launcher.run_dir.wandb import Tracker
from rollout.evaluation import EvaluationRow
from rollout.processes import ProcessId
from rollout.rewards.text_actor import WrittenSamples


class WandbRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, object]]] = []

    def log(self, data: dict[str, object], step: int) -> None:
        self.logged.append((step, dict(data)))


class Engines:
    def __len__(self) -> int:
        return 1

    def drain_trace(self, *, timeout_s: float) -> dict[int, np.ndarray]:
        del timeout_s
        return {}


class RemoteMethod:
    def remote(self, *args: object, **options: object) -> str:
        del args, options
        return "samples"


class TextActor:
    write_samples = RemoteMethod()


def evaluation(step: int, average: float) -> EvaluationRow:
    return EvaluationRow(
        set_name="held_out",
        data_source="all",
        format="int8",
        step=step,
        num_prompts=2,
        samples_per_prompt=1,
        average=average,
        passed=average,
        truncated=0.0,
        mean_length=5.0,
    )


def test_an_evaluation_is_logged_with_the_step_of_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [ProcessId(node_id="n", pid=pid, created_s=0.0) for pid in (7, 8)]  # the text actor was restarted
    answers = iter([WrittenSamples(rows=[], process=process) for process in processes])
    monkeypatch.setattr(ray, "get", lambda ref: next(answers))
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    run = WandbRun()
    with RunDirectory(str(tmp_path / "run")) as directory:
        (directory.path / "wandb").mkdir(exist_ok=True)
        recorder = RunRecorder(
            directory,
            Tracker(run, directory.path / "wandb" / "tracking.json", -1, "x"),
            RunProgress(2),
            status=StatusFile(run_dir=directory.path, num_steps=2, step=0),
            text_actor=TextActor(),
            engines=Engines(),
            saves=Saves(directory, history=None, keep_last=1, background=True),
            baseline_engines=(),
            table_rows=0,
            record_traces=False,
        )
        recorder.on_evaluation([evaluation(0, 0.25)])
        recorder.on_step(0, {"reward/mean": 0.1, "timing_s/step": 1.0}, [])
        recorder.on_step(1, {"reward/mean": 0.2, "timing_s/step": 1.0}, [])
        recorder.on_evaluation([evaluation(2, 0.75)])
        recorder.finish()
    accuracy = {step: data.get("eval/held_out/int8/avg@1") for step, data in run.logged}
    assert accuracy == {0: 0.25, 1: None, 2: 0.75}
    assert [data.get("reward/mean") for _, data in run.logged] == [0.1, 0.2, None]
