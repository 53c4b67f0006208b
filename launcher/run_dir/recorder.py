"""Records a run: connects the training loop with the run directory, wandb and the console.

A step's metrics go to `metrics.jsonl`, then to the console. The text actor writes the step's samples (the
controller holds no text) while the next step runs. The recorder waits for them before the next step's samples, and
then logs the step to wandb. Checkpoints: `launcher.run_dir.saves`.

Invariant: a checkpoint is the newest only after the samples of all its steps are on disk.
"""

import math
import time
from collections.abc import Sequence

import numpy as np
import ray

from history.patience import Patience
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.forward_traces import append_forwards
from launcher.run_dir.saves import Saves
from launcher.run_dir.status import StatusFile
from launcher.run_dir.step_timeline import StepTimeline
from launcher.run_dir.wandb import Tracker
from megatron_rl.algorithm.guard import GuardState
from megatron_rl.trainer.group import TrainerGroup
from rollout.evaluation import EvaluationRow
from rollout.failures import DeadlineError, Place
from rollout.planning.planner import Planner
from rollout.pool.engine_group import EngineGroup
from rollout.pool.heartbeat import LOOK_EVERY_S, Heartbeat
from rollout.processes import ProcessId
from rollout.rewards.text_actor import WrittenSamples
from rollout.tracing.draft_savings import seconds_saved
from rollout.tracing.engine_speed import EngineSpeed
from rollout.tracing.forwards import FORWARD, Forwards
from rollout.types import ScoredGroup

TRACE_TIMEOUT_S = 120.0
"""Deadline for engines to return their forwards."""

WRITE_TIMEOUT_S = 300.0
"""Longest time in which the text actor writes a step's samples, while its process answers; tokens add to it."""
WRITTEN_TOKENS_S = 1e5
"""Response tokens that the text actor writes in a second at least; one core decodes several times as many."""
_SLOW = "has not written the samples in time"


class RunRecorder:
    """Satisfies `megatron_rl.controller.controller.Recorder`."""

    def __init__(
        self,
        directory: RunDirectory,
        tracker: Tracker,
        progress: RunProgress,
        *,
        status: StatusFile,
        text_actor: ray.actor.ActorHandle,
        engines: EngineGroup,
        saves: Saves,
        baseline_engines: Sequence[int],
        table_rows: int,
        record_traces: bool,
    ) -> None:
        """`table_rows` is the number of responses per step in wandb's table.

        `baseline_engines` do not draft; the saving of the drafting engines is measured against them.
        """
        self._directory = directory
        self._tracker = tracker
        self._progress = progress
        self._status = status
        self._text_actor = text_actor
        self._heartbeat = Heartbeat(text_actor)
        self._engines = engines
        self._timeline = StepTimeline(len(self._engines))
        self._saves = saves
        self._baseline_engines = tuple(baseline_engines)
        self._table_rows = table_rows
        self._record_traces = record_traces
        self._pending: ray.ObjectRef | None = None
        self._write_limit_s = WRITE_TIMEOUT_S
        self._writers: set[ProcessId] = set()
        """Processes of the text actor that have written samples."""
        self._newest_s = [-math.inf] * len(self._engines)
        """By engine, wall clock at the start of its newest recorded forward."""
        self._num_preempted = 0
        """Requests that were preempted since the last step, those of evaluations included."""
        self._num_lost_samples = 0
        """Steps with samples that nobody could write, because their tokens were lost with a node."""
        self._unlogged: tuple[int, dict[str, float]] | None = None
        self._evaluated = _newest_evaluation(directory)
        """Finished steps and metrics of the evaluation that wandb gets with the next step.

        That of an earlier start may not have reached wandb, because the run stopped before its next step. If the next
        step has another number, wandb has it, or the evaluation will be repeated.
        """

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Move the bar, and finish a save that is written with the samples of its steps."""
        self._progress.phase(phase, done, total)
        self._status.progress(done, total)
        if self._saves.is_under_way and self._samples_are_written():
            self.flush()
            self._saves.finish_if_written(is_step=False)

    def begin_phase(self, actor: str, activity: str) -> None:
        """A phase begins (`megatron_rl.controller.phases.BeginPhase`)."""
        self._status.phase(actor, activity)

    def begin_part(self, part: str) -> None:
        """A part of the present phase begins (`megatron_rl.controller.publisher.PublishPart`)."""
        self._status.part(part)

    def record_span(self, actor: str, activity: str, start_s: float, end_s: float) -> None:
        """Record a span (`megatron_rl.controller.phases.RecordSpan`)."""
        self._directory.record_span(actor, activity, start_s, end_s)
        self._timeline.add_span(actor, activity, start_s, end_s)

    def on_step(self, step: int, metrics: dict[str, float], groups: list[ScoredGroup]) -> None:
        """Record a step's metrics, samples, traces and forwards."""
        ended_s = time.time()
        if self._saves.is_under_way:
            self.flush()
            self._saves.finish_if_written(is_step=True)
        earlier_s, forwards = tuple(self._newest_s), self._record_forwards()
        metrics = {
            **metrics,
            **self._timeline.close(ended_s, metrics["timing_s/step"], retired=self._engines.retired),
            **self._saves.metrics(),
            "engine/preempted": float(self._num_preempted),
            "reward/text_actor_restarts": float(max(0, len(self._writers) - 1)),
            "reward/steps_without_samples": float(self._num_lost_samples),
        }
        self._num_preempted = 0
        if self._baseline_engines:
            saved_s = seconds_saved(forwards, groups, self._baseline_engines, earlier_s=earlier_s)
            metrics = {**metrics, **_saving(saved_s)}
        self._directory.append_metrics(step, metrics, ended_s=ended_s)
        self._status.finished(step)
        self._progress.step(step, metrics)
        self.flush()
        self._pending = self._text_actor.write_samples.remote(
            groups,
            samples_path=str(self._directory.samples_path(step)),
            traces_path=str(self._directory.traces_path(step)) if self._record_traces else "",
            num_returned=self._table_rows,
        )
        num_tokens = sum(sum(group.summary.lengths) for group in groups)
        self._write_limit_s = WRITE_TIMEOUT_S + num_tokens / WRITTEN_TOKENS_S
        self._heartbeat.ask()
        evaluated_at, evaluated = self._evaluated or (step, {})
        self._unlogged = (step, {**metrics, **evaluated} if evaluated_at == step else metrics)
        self._evaluated = None

    def _record_forwards(self) -> list[Forwards]:
        """Append every engine's forwards since the last call to its file in `traces/`."""
        drained = [np.zeros(0, dtype=FORWARD)] * len(self._engines)
        for number, forwards in self._engines.drain_trace(timeout_s=TRACE_TIMEOUT_S).items():
            drained[number] = forwards
        for number, forwards in enumerate(drained):
            append_forwards(self._directory.path / "traces", number, forwards)
            self._num_preempted += int(forwards["num_preempted"].sum())
            self._newest_s[number] = float(forwards["started_at_s"].max(initial=self._newest_s[number]))
        self._timeline.add_forwards(drained)
        return drained

    @property
    def engine_speed(self) -> EngineSpeed | None:
        """Cost of forwards, fitted after the last step; None while there are too few forwards."""
        return self._timeline.speed

    def _samples_are_written(self) -> bool:
        return self._pending is None or bool(ray.wait([self._pending], timeout=0)[0])

    def flush(self) -> None:
        """Wait for samples that are being written, and log their step to wandb."""
        if self._pending is None or self._unlogged is None:
            return
        rows = self._written(self._pending)
        step, metrics = self._unlogged
        self._tracker.log_step(step, metrics, rows)
        self._pending = self._unlogged = None

    def _written(self, writing: ray.ObjectRef) -> list[dict[str, object]]:
        """The result of the text actor. One that hangs leaves its stacks and is restarted, and Ray repeats the call.

        Raises:
            DeadlineError: the process answers, and the samples are not written after the second try.
        """
        num_slow = 0
        while why := self._why_late(writing):
            num_slow += why == _SLOW
            named = self._heartbeat.named("the text actor")
            if num_slow == 2:
                raise DeadlineError(
                    f"the controller waited {2 * self._write_limit_s:.0f} s for {named} to write samples",
                    Place(role="text actor", node=self._heartbeat.host),
                )
            self._progress.say(f"{named} {why} and is restarted")
            if folders := self._heartbeat.end():
                self._progress.say(f"the stacks of the text actor are in {', '.join(folders)}")
        try:
            written: WrittenSamples = ray.get(writing)
        except ray.exceptions.ObjectLostError:
            self._num_lost_samples += 1
            self._progress.say("the samples of a step were lost with a node before they were written")
            return []
        if written.num_lost:
            self._num_lost_samples += 1
            self._progress.say(f"the samples of {written.num_lost} group(s) of a step were lost with a node")
        self._writers.add(written.process)
        self._heartbeat.note(written.process)
        return [dict(row) for row in written.rows]

    def _why_late(self, writing: ray.ObjectRef) -> str:
        """Wait for the text actor; empty if it has written, else why it is not waited for any more."""
        patience = Patience(self._write_limit_s)
        while not ray.wait([writing], timeout=patience.look_s(LOOK_EVERY_S))[0]:
            if silent_s := self._heartbeat.missed():
                return f"has not answered for {silent_s:.0f} s"
            if patience.is_over():
                return _SLOW
        return ""

    def finish(self) -> None:
        """Log what no later step would log: the samples of the last step, and the evaluation after it."""
        self.flush()
        if self._evaluated is not None:
            self._tracker.log_evaluation(*self._evaluated)
            self._evaluated = None

    def on_evaluation(self, rows: list[EvaluationRow]) -> None:
        """Record an evaluation and its forwards; after the last evaluation no step would fetch them.

        wandb gets it with the next step, whose number is that of the finished steps, also from a later start.
        """
        self._record_forwards()
        if rows:
            self._evaluated = (rows[0].step, _metrics(rows))
        self._directory.append_evaluation([row.as_row() for row in rows])
        self._progress.evaluation(rows)

    def record_event(self, actor: str, text: str) -> None:
        """Print a line, and record it in `events.jsonl` as a span without length."""
        now_s = time.time()
        self._progress.say(f"{actor}: {text}")
        self._directory.record_span(actor, text, now_s, now_s)

    def save(self, finished_steps: int, trainer: TrainerGroup, planner: Planner, guard: GuardState) -> None:
        """Begin a checkpoint. With `checkpoint.background` the samples of its last step may be unfinished."""
        if self._saves.is_under_way or not self._saves.in_background:
            self.flush()
        self._saves.begin(finished_steps, trainer, planner, guard)

    def finish_save(self) -> None:
        """Wait until the last checkpoint is written and is the newest."""
        if self._saves.is_under_way:
            self.begin_phase("trainer", "checkpoint")
            self.flush()
        self._saves.finish()

    def on_trainer_lost(self) -> None:
        """Give up a checkpoint under way and the step that the trainer had begun."""
        self._saves.forget()
        self._timeline.begin_anew()


def _newest_evaluation(directory: RunDirectory) -> tuple[int, dict[str, float]] | None:
    """Finished steps and metrics of the newest evaluation on disk; None without one."""
    rows = [EvaluationRow.from_row(row) for row in directory.evaluation()]
    if not rows:
        return None
    step = max(row.step for row in rows)
    return step, _metrics([row for row in rows if row.step == step])


def _metrics(rows: Sequence[EvaluationRow]) -> dict[str, float]:
    return {name: value for row in rows for name, value in row.metrics().items()}


def _saving(seconds: float) -> dict[str, float]:
    return {} if math.isnan(seconds) else {"history/saved_s_measured": seconds}
