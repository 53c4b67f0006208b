"""The training loop: one step samples, trains and publishes.

Objects passed to the constructor hold everything that differs between runs. The planner decides when prompts are
admitted, the phases share devices, the publisher sends weights, the recorder writes results. The loop fixes the order:
policy version t is published before step t samples, step t trains on its samples, and the result is published as t + 1.

The groups of the next step start beside an evaluation, in seats that it leaves free: both sample with one version, and
an evaluation ends with its longest answers only.

The controller never holds tokens, only handles (`ScoredGroup.columns`), and never imports torch.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, Protocol

from megatron_rl.algorithm.guard import GuardState
from megatron_rl.batching.balance import PackingRules
from megatron_rl.batching.batch import TrainBatch, build_batch
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.config import AlgorithmConfig
from megatron_rl.controller.engine_revival import EngineRestarter
from megatron_rl.controller.guarding import Guard
from megatron_rl.controller.phases import Phases
from megatron_rl.controller.publish_report import PublishReport
from megatron_rl.controller.publisher import Publisher
from megatron_rl.controller.step_metrics import step_metrics
from megatron_rl.controller.stopping import EngineFormatError, RolloutInterruptedError, StopRequestedError
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.messages import StepResult
from rollout.evaluation import EvaluationRow
from rollout.failures import PlacedError
from rollout.planning.planner import Due, Planner
from rollout.pool.engine_pool import EnginePool
from rollout.pool.evaluator import Evaluator
from rollout.pool.history_client import HistoryClient
from rollout.seeds import derive_seed
from rollout.types import PromptId, ScoredGroup

_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records the results of a run: `launcher.run_dir.recorder.RunRecorder`, or a list in tests."""

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Report that `done` of `total` responses of a long phase are complete."""

    def on_step(self, step: int, metrics: dict[str, float], groups: list[ScoredGroup]) -> None:
        """Record metrics and samples of a finished step."""

    def on_evaluation(self, rows: list[EvaluationRow]) -> None:
        """Record a finished evaluation."""

    def save(self, finished_steps: int, trainer: TrainerGroup, planner: Planner, guard: GuardState) -> None:
        """Begin a checkpoint from which a run resumes after `finished_steps` steps; it may be written meanwhile."""

    def finish_save(self) -> None:
        """Wait until the last checkpoint is written and is the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Numbers that the loop itself reads."""

    num_steps: int
    evaluate_every: int
    """0: before the first and after the last step only."""
    checkpoint_every: int
    """0: after the last step only."""
    max_micro_batch_tokens: int
    data_parallel: int
    costs: CostModel
    """Costs by which samples are spread over ranks and micro batches."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """What restarts of the trainer have cost since the run's process started."""

    num_restarts: int = 0
    num_steps: int = 0
    """Finished steps that were done again."""


@dataclass(slots=True, kw_only=True)
class Controller:
    """Runs all steps from `first_step` to the end.

    It is not used again after an error. If the trainer has failed, another controller goes on from the newest
    checkpoint, with another trainer and the same engines and history.
    """

    planner: Planner
    pool: EnginePool
    trainer: TrainerGroup
    publisher: Publisher
    phases: Phases
    evaluator: Evaluator
    recorder: Recorder
    algorithm: AlgorithmConfig
    settings: LoopSettings
    restarter: EngineRestarter
    history: HistoryClient | None = None
    """None: engines do not draft."""
    first_step: int = 0
    repeated: Repeated = Repeated()
    earlier: Mapping[str, float] = field(default_factory=dict)
    """`totals` of the controller before this one, by metric; empty for the first one."""
    stop_requested: Callable[[], bool] = lambda: False
    """Whether the run is to end early. Asked before each step and during its rollout."""
    guard: Guard | None = None
    """None: `algorithm.guard.mode` is off."""
    check_places: Callable[[], None] = lambda: None
    """Asked during each rollout. Raises if the rollout is in vain, because the trainer's node is gone."""
    num_repeated_publishes: int = field(default=0, init=False)
    """Publishes that were repeated because an engine died."""
    saved_step: int = field(default=0, init=False)
    """Step of the newest checkpoint, which may still be being written."""
    num_trained: int = field(default=0, init=False)
    """Steps that the trainer has finished."""
    _admitted_step: int = field(default=-1, init=False)
    """Newest version for which the groups that were due have been admitted."""
    _refilled_at: float | None = field(default=None, init=False)
    """When the step admitted groups in place of others for the first time."""
    _refill_s: float = field(default=0.0, init=False)
    """Seconds from then to the end of the rollout."""

    def __post_init__(self) -> None:
        self.saved_step = self.first_step

    def run(self) -> None:
        """Run every remaining step; returns when the last one is published, evaluated and saved.

        Raises:
            StopRequestedError: `stop_requested` became true; the newest checkpoint holds all finished steps.
            EngineFormatError: the guard wants other weight formats; the newest checkpoint holds all finished steps.
            PlacedError: the trainer failed; a checkpoint that could not be written is noticed in the next step.
        """
        with self.phases.clock.suspension.watched():
            self._run()

    def _run(self) -> None:
        self._make_ready(self.first_step)
        self._publish(self.first_step)
        if self.history is not None:
            self.history.discard_drafts(keeps_requests=False)  # those of an attempt that a lost trainer ended
        if self.first_step == 0:
            self._evaluate(0)
        for step in range(self.first_step, self.settings.num_steps):
            if self.stop_requested():
                self._stop(step)
            self.phases.clock.begin_step()
            self._replace_idle_engine(step)
            self._admit_due(step)
            groups = self._sample(step)
            outdated = self.pool.drop(self.planner.outdated(step))
            if self.history is not None:
                self.history.record_rewards([*groups, *outdated])
            self.planner.put_back(outdated)
            self.planner.consumed(groups)
            self._make_ready(step + 1)
            batch = self._batch(groups, step)
            with self.phases.train(afterwards=self.restarter.restart_lost):  # the pool must not wait for vLLM's start
                result = self.trainer.train(batch)
                self.num_trained += 1
            published = self._publish(step + 1)
            self._record(step, groups, batch, result, published)
            self._after(step + 1)

    def _replace_idle_engine(self, step: int) -> None:
        """Replace the engine of a deterministic run if it died between two steps.

        Once it has groups, its death loses the step, and the run returns to its checkpoint with another trainer. Other
        runs need no such look: groups go to other engines, or the pool brings one.
        """
        if self.pool.samples_whole_steps and self.restarter.restart_lost(ask_ranks=True):
            self.num_repeated_publishes += 1
            self._publish(step)

    def _sample(self, step: int) -> list[ScoredGroup]:
        """The groups of a step. A stop request ends the rollout; after a resume the step is sampled again.

        With dynamic sampling groups without signal are among them.
        """
        self._refilled_at = None
        refill = partial(self._refill, step) if self.algorithm.max_refill else None
        try:
            with self.phases.rollout():
                groups = self.pool.take_batch(step, progress=self._progress("rollout"), refill=refill)
        except RolloutInterruptedError:
            self._stop(step)
        self._refill_s = 0.0 if self._refilled_at is None else self.phases.clock.awake_s() - self._refilled_at
        return groups

    def _refill(self, step: int) -> None:
        """Admit more groups if those in the pool cannot fill the batch."""
        due = self.planner.refill(step, self.pool.loads())
        if due is not None:
            self._refilled_at = self._refilled_at or self.phases.clock.awake_s()
            self._admit(due)

    def _admit_due(self, step: int) -> None:
        """Admit the groups that are due at a version, once."""
        if step > self._admitted_step:
            self._admitted_step = step
            self._admit(self.planner.due(step, self.pool.loads()))

    def _admit(self, due: Due) -> None:
        if self.history is not None:
            self.history.place([self.pool.homes(), self.pool.planned(due.groups, due.plan)])
        self.pool.admit(due.groups, due.plan)

    def _stop(self, finished_steps: int) -> NoReturn:
        """Save what no checkpoint holds yet, and end the run."""
        self._save_finished(finished_steps)
        raise StopRequestedError(finished_steps)

    def _save_finished(self, finished_steps: int) -> None:
        if finished_steps > self.saved_step:
            self._save(finished_steps)
        self.recorder.finish_save()

    def _publish(self, version: int) -> PublishReport:
        """Publish `version` to every engine. If an engine dies, restart it and repeat the publish.

        Raises:
            RuntimeError: the trainer failed, or the publish failed although no engine died, or engines have died too
                often.
        """
        while True:
            try:
                with self.phases.publish():
                    return self.publisher.publish(version)
            except RuntimeError as error:
                if isinstance(error, PlacedError) and error.place.role == "trainer":
                    raise
                if not self.restarter.restart_lost(ask_ranks=True):
                    raise
                self.num_repeated_publishes += 1
                _log.warning("weight version %d is published again, because an engine died: %s", version, error)

    def _make_ready(self, finished_steps: int) -> None:
        """Prefetch the history of the next groups: an evaluation's if one is due, then those of the next step.

        The call does not wait; the prefetch runs while the trainer works.
        """
        if self.history is None:
            return
        upcoming = []
        if self._evaluates_after(finished_steps):
            upcoming.append(self.pool.planned(self.evaluator.upcoming(finished_steps)))
        if finished_steps < self.settings.num_steps:
            due = self.planner.upcoming(finished_steps, self.pool.loads())
            upcoming.append(self.pool.planned(due.groups, due.plan))
        self.history.prefetch(self.pool.homes(), upcoming)

    def _batch(self, groups: list[ScoredGroup], step: int) -> TrainBatch:
        batch = build_batch(
            groups,
            step,
            algorithm=self.algorithm,
            rules=PackingRules(
                num_ranks=self.settings.data_parallel,
                max_tokens=self.settings.max_micro_batch_tokens,
                costs=self.settings.costs,
            ),
            seed=derive_seed(self.settings.seed, purpose="batch", step=step, prompt_id=PromptId(""), sample=0),
        )
        return batch if self.guard is None else replace(batch, cap=self.guard.in_force.cap)

    def _record(
        self, step: int, groups: list[ScoredGroup], batch: TrainBatch, result: StepResult, published: PublishReport
    ) -> None:
        metrics = (
            step_metrics(groups, batch.counts, result, published, self.phases.clock.seconds())
            | self.planner.metrics()
            | self.totals()
        )
        metrics["trainer/restarts"] = float(self.repeated.num_restarts)
        metrics["trainer/repeated_steps"] = float(self.repeated.num_steps)
        metrics["engine/restarts"] = float(self.restarter.num_restarts)
        metrics["engine/serving"] = float(self.restarter.num_serving)
        metrics["cluster/lost_nodes"] = float(self.restarter.num_lost_nodes)
        metrics["engine/hung"] = float(self.pool.num_hung)
        if self.algorithm.max_refill:
            metrics["timing_s/refill"] = self._refill_s
        if self.history is not None:
            metrics |= self.history.metrics()
        if self.guard is not None:
            metrics |= self.guard.after_step(step, result.metrics, published)
            self.planner.limit_overlap(self.guard.in_force.overlap)
        self.recorder.on_step(step, metrics, groups)

    def totals(self) -> dict[str, float]:
        """Counts by metric, of this controller and of those before it, whose pool and planner are gone."""
        workers = self.pool.reward_workers
        counts = {
            "reward/scorer_restarts": self.pool.num_scorer_restarts,
            "reward/worker_restarts": workers.num_restarts,
            "reward/repeated_calls": workers.num_repeated,
            "reward/stray_processes": workers.num_strays,
            "publish/repeated": self.num_repeated_publishes,
            "engine/reissued_groups": self.pool.num_reissued,
            "planner/moved_groups": self.pool.migration.num_moved,
        }
        if self.planner.num_waits is not None:
            counts["planner/waits_for_age"] = self.planner.num_waits
        return {name: self.earlier.get(name, 0.0) + count for name, count in counts.items()}

    def _after(self, finished_steps: int) -> None:
        last = finished_steps == self.settings.num_steps
        if self._evaluates_after(finished_steps):
            self._evaluate(finished_steps)
        if self._saves_after(finished_steps):
            self._save(finished_steps)
            if self.phases.needs_publish and not last:
                self._publish(finished_steps)
        if last:
            self.recorder.finish_save()
        elif self.guard is not None and self.guard.needs_other_engines:
            self._save_finished(finished_steps)
            raise EngineFormatError(finished_steps, num_lost_nodes=self.restarter.num_lost_nodes)

    def _save(self, finished_steps: int) -> None:
        with self.phases.checkpoint():
            guard = GuardState() if self.guard is None else self.guard.state
            self.recorder.save(finished_steps, self.trainer, self.planner, guard)
        self.saved_step = finished_steps

    def _saves_after(self, finished_steps: int) -> bool:
        is_last = finished_steps == self.settings.num_steps
        return finished_steps > 0 and (is_last or _is_due(finished_steps, self.settings.checkpoint_every))

    def _evaluates_after(self, finished_steps: int) -> bool:
        ends = (0, self.settings.num_steps)
        return finished_steps in ends or _is_due(finished_steps, self.settings.evaluate_every)

    def _evaluate(self, finished_steps: int) -> None:
        with self.phases.evaluate():
            self.evaluator.admit(self.pool, finished_steps)
            if self._samples_beside_evaluation(finished_steps):
                self._admit_due(finished_steps)
            rows = self.evaluator.take(self.pool, finished_steps, progress=self._progress("evaluate"))
        self.recorder.on_evaluation(rows)
        if self.history is not None:
            self.history.discard_drafts(keeps_requests=True)

    def _samples_beside_evaluation(self, finished_steps: int) -> bool:
        """Whether another step follows with these engines, and its batches may depend on timing.

        Engines that sleep in a save would lose what they have computed for unfinished responses.
        """
        if self.guard is not None and self.guard.needs_other_engines:
            return False
        if self.phases.engines_sleep and self._saves_after(finished_steps):
            return False
        return finished_steps < self.settings.num_steps and not self.pool.samples_whole_steps

    def _progress(self, phase: str) -> "_PhaseProgress":
        stop = self.stop_requested if phase == "rollout" else None
        return _PhaseProgress(recorder=self.recorder, phase=phase, check=self._check_trainer, stop_requested=stop)

    def _check_trainer(self) -> None:
        """Leave a rollout that is in vain, because the idle trainer, or its node, is gone."""
        self.check_places()
        self.trainer.ranks.check_idle()


@dataclass(frozen=True, slots=True, kw_only=True)
class _PhaseProgress:
    recorder: Recorder
    phase: str
    check: Callable[[], None]
    stop_requested: Callable[[], bool] | None
    """None where the phase may not be left."""

    def __call__(self, done: int, total: int) -> None:
        self.recorder.on_progress(self.phase, done, total)
        self.check()
        if self.stop_requested is not None and done < total and self.stop_requested():
            raise RolloutInterruptedError


def _is_due(finished_steps: int, every: int) -> bool:
    return every > 0 and finished_steps % every == 0
