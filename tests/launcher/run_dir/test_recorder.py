"""Evaluations reach wandb with the step of the same number; a text actor that hangs is named and restarted."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from launcher.config.schema import WandbConfig
from launcher.report.metric_table import MetricTable
from launcher.report.run_timeline import read_timeline
from launcher.report.timeline_section import last_steps
from launcher.run_dir import recorder as recorder_module
from launcher.run_dir import saves as saves_module
from launcher.run_dir import wandb as tracking
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.recorder import RunRecorder
from launcher.run_dir.saves import Saves
from launcher.run_dir.status import StatusFile
from launcher.run_dir.wandb import Tracked, Tracker
from megatron_rl.algorithm.guard import GuardState
from megatron_rl.config import CheckpointConfig
from rollout.evaluation import EvaluationRow
from rollout.failures import DeadlineError, Place
from rollout.pool import heartbeat
from rollout.processes import ProcessId
from rollout.rewards.text_actor import WrittenSamples
from rollout.tracing.forwards import FORWARD, decode_forwards
from tests.launcher.run_dir.test_saves import Planner
from tests.launcher.run_dir.test_saves import Trainer as SavedTrainer

ORIGIN_S = 1.7e9


class WandbRun:
    """An online wandb: rows merge with the newest one of their step, and those of earlier steps are dropped."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, object]]] = []
        self.starting_step = 0

    def log(self, data: dict[str, object], step: int) -> None:
        newest = self.logged[-1][0] if self.logged else -1
        if step == newest and step >= self.starting_step:
            self.logged[-1][1].update(data)
        elif step > newest:
            self.logged.append((step, dict(data)))

    def start(self, *_: object) -> "WandbRun":
        """Another start of the same wandb run."""
        self.starting_step = self.logged[-1][0] + 1 if self.logged else 0
        return self


class Engines:
    def __init__(self) -> None:
        self.drained: list[np.ndarray] = []
        self.retired: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 1

    def drain_trace(self, *, timeout_s: float) -> dict[int, np.ndarray]:
        del timeout_s
        return {0: self.drained.pop(0)} if self.drained else {}


class RemoteMethod:
    def __init__(self, ref: str) -> None:
        self.ref = ref

    def remote(self, *args: object, **options: object) -> str:
        del args, options
        return self.ref


class TextActor:
    write_samples = RemoteMethod("samples")
    alive = RemoteMethod("alive")


class WrittenTrainer(SavedTrainer):
    """Ranks that have written when they are asked."""

    def begin_save(self, path: str, *, background: bool) -> None:
        del background
        Path(path).mkdir()
        self.log.append("begin")

    def save_is_written(self, *, wait_s: float) -> bool:
        del wait_s
        return True


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


def recorder_of(
    directory: RunDirectory,
    run: WandbRun,
    progress: RunProgress,
    *,
    background: bool = True,
    tracker: Tracker | None = None,
) -> RunRecorder:
    (directory.path / "wandb").mkdir(exist_ok=True)
    return RunRecorder(
        directory,
        tracker or Tracker(run, directory.path / "wandb" / "tracking.json", Tracked(run_id="x")),
        progress,
        status=StatusFile(run_dir=directory.path, num_steps=2, step=0),
        text_actor=TextActor(),
        engines=Engines(),
        saves=Saves(directory, CheckpointConfig(keep_last=1, background=background), history=None),
        baseline_engines=(),
        table_rows=0,
        record_traces=False,
    )


def test_an_evaluation_is_logged_with_the_step_of_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [ProcessId(node_id="n", pid=pid, start_ticks=0) for pid in (7, 8)]  # the text actor was restarted
    answers = iter([WrittenSamples(rows=[], process=process) for process in processes])
    monkeypatch.setattr(ray, "get", lambda ref: next(answers) if ref == "samples" else processes[0])
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    run = WandbRun()
    with RunDirectory(str(tmp_path / "run")) as directory:
        recorder = recorder_of(directory, run, RunProgress(2))
        recorder.on_evaluation([evaluation(0, 0.25)])
        recorder.on_step(0, {"reward/mean": 0.1, "timing_s/step": 1.0}, [])
        recorder.on_step(1, {"reward/mean": 0.2, "timing_s/step": 1.0}, [])
        recorder.on_evaluation([evaluation(2, 0.75)])
        recorder.finish()
    accuracy = {step: data.get("eval/held_out/int8/avg@1") for step, data in run.logged}
    assert accuracy == {0: 0.25, 1: 0.75}
    assert [data.get("reward/mean") for _, data in run.logged] == [0.1, 0.2]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text actor has written the samples whenever it is asked."""
    written = WrittenSamples(rows=[], process=ProcessId(node_id="n", pid=7, start_ticks=0))
    monkeypatch.setattr(ray, "get", lambda ref: written if ref == "samples" else written.process)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))


def accuracies(run: WandbRun) -> list[tuple[int, object, object]]:
    """(step, reward, accuracy) of each row."""
    return [(step, data.get("reward/mean"), data.get("eval/held_out/int8/avg@1")) for step, data in run.logged]


def test_an_evaluation_before_a_stop_is_logged_with_the_first_step_of_the_next_start(tmp_path: Path, written) -> None:
    """A stop finishes no recorder, and the next start does not repeat the evaluation."""
    run = WandbRun()
    with RunDirectory(tmp_path / "run") as directory:
        recorder = recorder_of(directory, run, RunProgress(4))
        recorder.on_step(1, {"reward/mean": 0.1, "timing_s/step": 1.0}, [])
        recorder.on_evaluation([evaluation(2, 0.75)])
        recorder.flush()  # as the checkpoint of a stop does
        resumed = recorder_of(directory, run, RunProgress(4))
        for step in (2, 3):
            resumed.on_step(step, {"reward/mean": step / 10, "timing_s/step": 1.0}, [])
        resumed.finish()
    assert accuracies(run) == [(1, 0.1, None), (2, 0.2, 0.75), (3, 0.3, None)]


def test_an_evaluation_that_will_be_repeated_is_not_logged_with_an_earlier_step(tmp_path: Path, written) -> None:
    """The trainer was lost after it, and the run has returned to an earlier checkpoint."""
    run = WandbRun()
    with RunDirectory(tmp_path / "run") as directory:
        recorder = recorder_of(directory, run, RunProgress(4))
        recorder.on_evaluation([evaluation(3, 0.5)])
        recorder.on_step(2, {"reward/mean": 0.2, "timing_s/step": 1.0}, [])
        recorder.on_evaluation([evaluation(3, 0.75)])
        recorder.on_step(3, {"reward/mean": 0.3, "timing_s/step": 1.0}, [])
        recorder.finish()
    assert accuracies(run) == [(2, 0.2, None), (3, 0.3, 0.75)]


def test_a_finished_run_that_gets_more_steps_logs_each_of_them(
    tmp_path: Path, written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation after what was the last step comes with the first of them again, as that of every other step."""
    run = WandbRun()
    monkeypatch.setattr(tracking, "_begin", run.start)
    with RunDirectory(tmp_path / "run") as directory:
        for first in (0, 2):
            tracker = Tracker.start(WandbConfig(), directory.path, {}, first_step=first)
            recorder = recorder_of(directory, run, RunProgress(4), tracker=tracker)
            for step in (first, first + 1):
                recorder.on_step(step, {"reward/mean": step / 10, "timing_s/step": 1.0}, [])
            recorder.on_evaluation([evaluation(first + 2, 0.75)])
            recorder.finish()
    assert accuracies(run) == [
        (0, 0.0, None),
        (1, 0.1, 0.75),
        (2, 0.2, 0.75),
        (3, 0.3, 0.75),
    ]


def test_preempted_requests_of_a_step_and_of_the_evaluation_before_it_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = WrittenSamples(rows=[], process=ProcessId(node_id="n", pid=7, start_ticks=0))
    monkeypatch.setattr(ray, "get", lambda ref: written if ref == "samples" else written.process)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    with RunDirectory(str(tmp_path / "run")) as directory:
        recorder = recorder_of(directory, WandbRun(), RunProgress(2))
        for counts in ([2, 0], [0, 3], []):
            forwards = np.zeros(len(counts), dtype=FORWARD)
            forwards["num_preempted"] = counts
            recorder._engines.drained.append(forwards)  # type: ignore[attr-defined]
        recorder.on_evaluation([evaluation(0, 0.25)])
        for step in range(2):
            recorder.on_step(step, {"timing_s/step": 1.0}, [])
        recorder.finish()
        assert [row["engine/preempted"] for row in directory.metrics()] == [5.0, 0.0]


def test_the_timeline_is_told_which_engines_were_given_up(
    tmp_path: Path, written, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, ...]] = []

    def close(end_s: float, step_s: float, *, retired: tuple[int, ...]) -> dict[str, float]:
        told.append(retired)
        return {}

    with RunDirectory(tmp_path / "run") as directory:
        recorder = recorder_of(directory, WandbRun(), RunProgress(1))
        monkeypatch.setattr(recorder._timeline, "close", close)
        recorder._engines.retired = (3,)
        recorder.on_step(0, {"timing_s/step": 1.0}, [])
        recorder.finish()
    assert told == [(3,)]


def test_the_time_of_a_row_is_the_end_of_its_step_although_a_save_and_engines_keep_the_recorder(
    tmp_path: Path, written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the picture of steps has a new start where the row of a step was late."""
    now_s = ORIGIN_S
    monkeypatch.setattr("launcher.run_dir.recorder.time.time", lambda: now_s)

    def finish(*, is_step: bool) -> None:
        nonlocal now_s
        now_s += 8.0

    with RunDirectory(tmp_path / "run") as directory:
        recorder = recorder_of(directory, WandbRun(), RunProgress(4))
        monkeypatch.setattr(recorder._saves, "finish_if_written", finish)
        for step in range(4):
            now_s = ORIGIN_S + 100.0 * (step + 1)
            monkeypatch.setattr(recorder._saves, "_save", object() if step == 2 else None)
            recorder.on_step(step, {"timing_s/step": 99.0}, [])
        recorder.finish()
        assert [row["time_s"] - ORIGIN_S for row in directory.metrics()] == [100.0, 200.0, 300.0, 400.0]
    timeline = read_timeline(directory.path, MetricTable.read(directory.path))
    assert [step.number for step in last_steps(timeline.steps)] == [1, 2, 3]


def at(*starts_s: float, seconds: float) -> np.ndarray:
    """Forwards of one engine."""
    forwards = np.zeros(len(starts_s), dtype=FORWARD)
    forwards["started_at_s"], forwards["seconds"] = starts_s, seconds
    return forwards


def test_no_saving_of_drafts_is_recorded_for_a_step_that_began_within_the_evaluation_before_it(
    tmp_path: Path, written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forwards of the evaluation were fetched with it. Engine 1 does not draft."""
    monkeypatch.setattr(Engines, "__len__", lambda self: 2)
    traces = iter(
        [
            {0: at(10, 12, seconds=1), 1: at(10, 12, seconds=1)},
            {0: at(13, 14, seconds=1), 1: at(13, seconds=2)},
            {0: at(21, 22, seconds=1), 1: at(21, seconds=2)},
        ]
    )

    def group(engine: int, length: int, started_at_s: float) -> SimpleNamespace:
        times = {"started_at_s": started_at_s, "finished_at_s": started_at_s + 5}
        return SimpleNamespace(summary=SimpleNamespace(engine_id=engine, lengths=(length, length), **times))

    with RunDirectory(tmp_path / "run") as directory:
        recorder = recorder_of(directory, WandbRun(), RunProgress(2))
        recorder._baseline_engines = (1,)
        monkeypatch.setattr(recorder._engines, "drain_trace", lambda *, timeout_s: next(traces))
        recorder.on_evaluation([evaluation(1, 0.25)])
        for step, began_s in ((1, 11.0), (2, 20.0)):
            recorder.on_step(step, {"timing_s/step": 1.0}, [group(0, 30, began_s), group(1, 10, began_s)])
        recorder.finish()
        saved = [row.get("history/saved_s_measured") for row in directory.metrics()]
    # engine 1 took 2 s for 20 tokens; the 60 tokens of engine 0 would have taken 6 s, and took 2
    assert saved == [None, pytest.approx(4.0)]


def test_forwards_of_older_traces_have_no_preemptions() -> None:
    older = np.dtype(
        [
            ("started_at_s", np.float64),
            ("num_running", np.int32),
            ("num_scheduled_tokens", np.int32),
            ("num_context_tokens", np.int64),
            ("seconds", np.float32),
        ]
    )
    found = decode_forwards(np.array([(7.5, 300, 310, 1 << 40, 0.25)], dtype=older).tobytes())
    assert found.tolist() == [(7.5, 300, 0, 310, 1 << 40, 0.25)]


def test_samples_that_were_lost_with_a_node_are_counted_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ProcessId(node_id="n", pid=7, start_ticks=0)

    def get(ref: str) -> ProcessId:
        if ref == "samples":
            raise ray.exceptions.ObjectLostError("id", None, "")
        return process

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    run = WandbRun()
    with RunDirectory(str(tmp_path / "run")) as directory:
        recorder = recorder_of(directory, run, RunProgress(2))
        for step in range(3):
            recorder.on_step(step, {"timing_s/step": 1.0}, [])  # waits for the samples of the step before
        recorder.finish()
    lost = [data["reward/steps_without_samples"] for _, data in run.logged if "timing_s/step" in data]
    assert lost == [0.0, 0.0, 1.0]


def test_samples_of_which_some_were_lost_with_a_node_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ProcessId(node_id="n", pid=7, start_ticks=0)
    answers = iter([WrittenSamples(rows=[], process=process, num_lost=number) for number in (0, 3, 0, 0)])
    monkeypatch.setattr(ray, "get", lambda ref: next(answers) if ref == "samples" else process)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    run, progress = WandbRun(), Lines()
    with RunDirectory(str(tmp_path / "run")) as directory:
        recorder = recorder_of(directory, run, progress)
        for step in range(4):
            recorder.on_step(step, {"timing_s/step": 1.0}, [])
        recorder.finish()
    lost = [data["reward/steps_without_samples"] for _, data in run.logged if "timing_s/step" in data]
    assert lost == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("background", [True, False])
def test_a_save_begins_before_its_samples_are_written_and_is_the_newest_only_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Saves that block the run are finished at once, so they wait for the samples first."""
    process = ProcessId(node_id="n", pid=7, start_ticks=0)
    log: list[str] = []
    is_written = False

    def wait(refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        if refs == ["samples"] and not is_written and timeout == 0:
            return [], refs
        if refs == ["samples"]:
            log.append("wait for samples")
        return refs, []

    monkeypatch.setattr(ray, "wait", wait)
    written = WrittenSamples(rows=[], process=process)
    monkeypatch.setattr(ray, "get", lambda ref: written if ref == "samples" else process)
    monkeypatch.setattr(saves_module, "LOOK_EVERY_S", 0.0)
    with RunDirectory(str(tmp_path / "run")) as directory:
        recorder = recorder_of(directory, WandbRun(), RunProgress(2), background=background)
        recorder.on_step(0, {"timing_s/step": 1.0}, [])
        recorder.save(1, WrittenTrainer(log), Planner(), GuardState())
        if not background:
            assert log == ["wait for samples", "begin", "finish"]
            assert directory.latest_checkpoint() is not None
            return
        recorder.on_progress("rollout", 0, 1)
        assert log == ["begin"] and directory.latest_checkpoint() is None
        is_written = True
        recorder.on_progress("rollout", 0, 1)
        assert log[-1] == "finish" and "wait for samples" in log
        latest = directory.latest_checkpoint()
        assert latest is not None and latest[0] == 1
        is_written = False
        del log[:]
        recorder.on_step(1, {"timing_s/step": 1.0}, [])
        recorder.save(2, WrittenTrainer(log), Planner(), GuardState())
        recorder.on_step(2, {"timing_s/step": 1.0}, [])  # waits for the samples, then looks whether the save is written
        assert log == ["begin", "wait for samples", "finish"]
        recorder.save(3, WrittenTrainer(log), Planner(), GuardState())
        recorder.finish_save()
        assert log[3:] == ["begin", "wait for samples", "finish"]


class Lines(RunProgress):
    """A console that keeps its lines about the text actor."""

    def __init__(self) -> None:
        super().__init__(2)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        if "the text actor" in text:
            self.lines.append(text)


@dataclass
class HungTextActor:
    """Ray and a text actor that writes nothing until its process was ended `num_ends` times."""

    freezes: bool
    num_ends: int
    ended: list[ProcessId] = field(default_factory=list)
    num_answers: int = 0

    def wait(self, refs: list[str], *, timeout: float) -> tuple[list[str], list[str]]:
        (ref,) = refs
        if ref == "samples":
            done = len(self.ended) == self.num_ends
        else:
            self.num_answers += 1
            done = not self.freezes or self.num_answers == 1
        if done:
            return refs, []
        time.sleep(timeout)
        return [], refs

    def get(self, ref: str) -> object:
        process = ProcessId(node_id="n", pid=7 + len(self.ended), start_ticks=0, host="gpu-03")
        return process if ref == "alive" else WrittenSamples(rows=[], process=process)

    def kill_on_nodes(self, processes: list[ProcessId], *, stacks: bool) -> tuple[str, ...]:
        assert stacks, "it leaves no stacks"
        self.ended += processes
        return ("logs/stacks",)


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool, int], Lines]]:
    def write(freezes: bool, num_ends: int, *, num_tokens: int = 0) -> Lines:
        """Record a step whose samples the text actor does not write, and wait for them."""
        text_actor, progress = HungTextActor(freezes, num_ends), Lines()
        monkeypatch.setattr(ray, "wait", text_actor.wait)
        monkeypatch.setattr(ray, "get", text_actor.get)
        monkeypatch.setattr(heartbeat, "kill_on_nodes", text_actor.kill_on_nodes)
        for module in (heartbeat, recorder_module):
            monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
        monkeypatch.setattr(heartbeat, "SILENT_S", 0.01)
        monkeypatch.setattr(recorder_module, "WRITE_TIMEOUT_S", 60.0 if freezes else 0.03)
        recorder = recorder_of(directory, WandbRun(), progress)
        group = SimpleNamespace(summary=SimpleNamespace(lengths=(num_tokens,)))
        recorder.on_step(0, {"timing_s/step": 1.0}, [group])
        recorder.finish()
        assert [process.pid for process in text_actor.ended] == [7]
        return progress

    with RunDirectory(str(tmp_path / "run")) as directory:
        yield write


def test_a_text_actor_that_freezes_is_named_with_its_node_leaves_its_stacks_and_is_restarted(hung) -> None:
    first, second = hung(True, 1).lines
    assert first == "the text actor (process 7 on gpu-03) has not answered for 0 s and is restarted"
    assert second == "the stacks of the text actor are in logs/stacks"


def test_a_text_actor_that_writes_too_long_leaves_its_stacks_once_and_is_named_then(hung) -> None:
    (first, _) = hung(False, 1).lines
    assert first.startswith("the text actor (process 7 on gpu-03) has not written the samples in time")
    with pytest.raises(DeadlineError, match=r"waited 0 s for the text actor \(process 8 on gpu-03\)") as late:
        hung(False, 2)
    assert late.value.place == Place(role="text actor", node="gpu-03")


def test_samples_of_more_tokens_have_more_time(hung, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "WRITTEN_TOKENS_S", 10.0)
    with pytest.raises(DeadlineError, match="waited 2 s for the text actor"):
        hung(False, 2, num_tokens=10)
