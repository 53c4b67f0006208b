"""Assembles a run: constructs its parts from the started processes and from the parts that they depend on.

This is the only place of assembly. `launcher.commands.specs` and `launcher.commands.build` turn the configuration into
the values of each part, so that no part gets the whole configuration.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from history.store.service import HistoryService
from launcher.checks.check import CheckedRun
from launcher.cluster.job_folder import note_begin
from launcher.cluster.processes import Processes
from launcher.commands.build import (
    build_delivery,
    build_publisher,
    check_restarted_engine,
    device_sharing,
    loop_settings,
    publish_plan,
    refill_rule,
    run_places,
    train_phase_policy,
)
from launcher.commands.evaluate import evaluation_of, run_settings
from launcher.commands.prompts import training_order
from launcher.commands.resume_point import ResumePoint, resume_point
from launcher.commands.specs import sampling_spec
from launcher.commands.startup import Inputs, Workers, read_inputs, start_trainer, start_workers
from launcher.config.schema import RunConfig
from launcher.endings.conclusion import Command
from launcher.endings.kinds import Ending, judge
from launcher.recovery.engines import EngineRestarter, LostEngines
from launcher.recovery.nodes import LostNodes
from launcher.recovery.restart_limit import RestartLimit
from launcher.recovery.trainer import TrainerRestarts
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.exported import replace_policy
from launcher.run_dir.places import write_places
from launcher.run_dir.recorder import RunRecorder
from launcher.run_dir.saves import Saves
from launcher.run_dir.status import StatusFile
from launcher.run_dir.stop_request import StopWatch
from launcher.run_dir.wandb import Tracker
from megatron_rl.algorithm.guard import Action
from megatron_rl.controller.colocation import DeviceSharing
from megatron_rl.controller.controller import Controller
from megatron_rl.controller.engine_revival import EngineRevival
from megatron_rl.controller.guarding import Guard
from megatron_rl.controller.phases import PhaseClock, Phases
from megatron_rl.trainer.group import TrainerGroup
from rollout.failures import CallError, PlacedError
from rollout.planning.migration import GroupMigration, MigrationRule
from rollout.planning.planner import Planner
from rollout.pool.callbacks import ignore_start
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.pool.engine_watch import EngineWatch
from rollout.pool.evaluator import Evaluator
from rollout.pool.history_client import HistoryClient
from rollout.pool.scorer_pool import scoring_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a person sees of a run: the console, `status.json` for other machines, the screen of a failure."""

    progress: RunProgress
    status: StatusFile
    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a run keeps while it replaces its trainer."""

    checked: CheckedRun
    directory: RunDirectory
    shown: Shown
    running: Processes
    inputs: Inputs
    history: HistoryClient | None
    recorder: RunRecorder
    lost_engines: LostEngines
    restarts: TrainerRestarts
    actions: Sequence[Action]
    """The guard's ladder."""

    @property
    def placed(self) -> CheckedRun:
        """The run with the present places of its processes."""
        return replace(self.checked, placement=self.lost_engines.nodes.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """The part of a run from one start of its trainer to the end, or to the failure of that trainer."""

    workers: Workers
    sharing: DeviceSharing | None
    controller: Controller | None = None
    """None before it is built."""


def execute(
    checked: CheckedRun,
    directory: RunDirectory,
    shown: Shown,
    running: Processes,
    resume: ResumePoint,
    actions: Sequence[Action],
) -> None:
    """Start the processes of a run, take all remaining steps, and write the last weights.

    `actions` is the guard's ladder. Ends the processes if all goes well; else `running` does.

    Raises:
        EngineFormatError: the guard wants engines with other weight formats.
    """
    config, run_id = checked.config, secrets.token_hex(4)
    progress, status = shown.progress, shown.status
    status.phase("text actor", "load prompts")
    inputs = read_inputs(checked, running, resume, run_id, progress)
    status.phase("engines and trainer", "start")
    # before the minutes of their start, because wandb's server may refuse the key
    settings = config.model_dump(mode="json")
    tracker = Tracker.start(config.wandb, directory.path, settings, first_step=resume.first_step, say=progress.say)
    with _tracked(tracker, shown):
        workers = start_workers(checked, running, resume, run_id, progress)
        note_begin()
        history = _history_client(inputs.history, workers.engines)
        recorder = _recorder(config, directory, tracker, shown, inputs, workers.engines)
        lost_engines = _lost_engines(checked, directory, shown, running, workers)
        parts = _Parts(
            checked=checked,
            directory=directory,
            shown=shown,
            running=running,
            inputs=inputs,
            history=history,
            recorder=recorder,
            lost_engines=lost_engines,
            restarts=TrainerRestarts(
                running=running,
                lost_engines=lost_engines,
                history=history,
                update_timeout_s=config.engine.update_timeout_s,
                limit=_restart_limit(config.trainer.max_restarts, status),
                say=progress.say,
            ),
            actions=actions,
        )
        trainer = _take_steps(parts, workers, resume)
        recorder.finish()
    _end(workers.engines, trainer, inputs, running)


@contextmanager
def _tracked(tracker: Tracker, shown: Shown) -> Iterator[None]:
    """The body starts engines and trainer and takes the steps; then the wandb run ends, also if the body raises."""
    try:
        yield
    finally:
        shown.progress.close()
        tracker.finish()
        shown.status.phase("controller", "end processes")


def _lost_engines(
    checked: CheckedRun, directory: RunDirectory, shown: Shown, running: Processes, workers: Workers
) -> LostEngines:
    nodes = LostNodes(
        running=running,
        placement=checked.placement,
        say=shown.progress.say,
        on_change=lambda placement: write_places(directory.path, run_places(placement)),
    )
    return LostEngines(
        running=running,
        engines=workers.engines,
        specs=workers.specs,
        nodes=nodes,
        limit=_restart_limit(checked.config.engine.max_restarts, shown.status),
        say=shown.progress.say,
        check_model=partial(check_restarted_engine, checked),
    )


def _restart_limit(max_restarts: int, status: StatusFile) -> RestartLimit:
    return RestartLimit(max_restarts=max_restarts, newest_step=lambda: status.newest_step)


def _take_steps(parts: _Parts, workers: Workers, resume: ResumePoint) -> TrainerGroup:
    """Take all remaining steps and export the last weights; returns the trainer.

    If the trainer fails, another one goes on from the newest checkpoint, as often as `trainer.max_restarts` allows.
    """
    sharing = device_sharing(parts.checked.config, workers.trainer, workers.engines)
    attempt, failure = _Attempt(workers=workers, sharing=sharing), None
    while True:
        try:
            if failure is not None:
                attempt, resume = _start_again(parts, attempt, failure)
            attempt = _with_controller(parts, attempt, resume)
            assert attempt.controller is not None
            attempt.controller.run()
            if attempt.sharing is not None:  # without a last step no save has sent the engines to sleep
                attempt.sharing.to_trainer()
            last = parts.checked.config.num_steps
            replace_policy(parts.directory.path, last, attempt.workers.trainer.export)
        except PlacedError as error:
            if not may_pass(error, attempt.controller):
                raise
            parts.restarts.check(error)
            parts.shown.progress.say(f"the trainer starts again from the newest checkpoint: {error}")
            failure = error
        else:
            return attempt.workers.trainer


def may_pass(error: PlacedError, controller: Controller | None) -> bool:
    """Whether a failure may be of the moment. An error of a rank that has never finished a step would come again."""
    if not isinstance(error, CallError):
        return True
    has_trained = controller is not None and controller.num_trained > 0
    return has_trained and judge(error).ending is Ending.DEFECT


def _start_again(parts: _Parts, attempt: _Attempt, failure: PlacedError) -> tuple[_Attempt, ResumePoint]:
    """Replace a trainer that failed by one that continues from the newest checkpoint."""
    workers = attempt.workers
    parts.shown.status.phase("trainer", "start again")
    pool = None if attempt.controller is None else attempt.controller.pool
    parts.restarts.clear(failure, workers.trainer, pool, attempt.sharing)
    if attempt.controller is not None:
        parts.restarts.totals = attempt.controller.totals()
    parts.recorder.flush()
    parts.recorder.on_trainer_lost()
    resume = resume_point(parts.directory)
    for note in resume.notes:
        parts.shown.progress.say(note)
    num_repeated = 0 if resume.lost is None else resume.lost.num_steps
    parts.restarts.count(num_repeated)
    parts.shown.progress.say(
        f"the trainer continues after step {resume.first_step}; {num_repeated} finished step(s) are repeated"
    )
    parts.shown.status.step = resume.first_step
    trainer = start_trainer(parts.placed, parts.running, resume, workers.run_id)
    sharing = device_sharing(parts.checked.config, trainer, workers.engines)
    return _Attempt(workers=replace(workers, trainer=trainer), sharing=sharing), resume


def _with_controller(parts: _Parts, attempt: _Attempt, resume: ResumePoint) -> _Attempt:
    """Connect the trainer with the engines, and build the loop over them."""
    checked, config, workers, sharing = parts.placed, parts.checked.config, attempt.workers, attempt.sharing
    engines, recorder = workers.engines, parts.recorder
    plan = publish_plan(checked, workers)
    delivery = build_delivery(checked, workers, plan)
    delivery.connect()
    planner, guard = _planner(config, parts.inputs, resume), _guard(parts, resume)
    if guard is not None:
        planner.limit_overlap(guard.in_force.overlap)
    publisher = build_publisher(checked, workers, delivery, plan, sharing, recorder.begin_part)
    restarter = EngineRestarter(lost=parts.lost_engines, delivery=delivery, history=parts.history, sharing=sharing)
    clock = PhaseClock(recorder.record_span, recorder.begin_phase)
    revival = EngineRevival(restarter=restarter, publisher=publisher, clock=clock, sharing=sharing)
    pool = _pool(parts, engines, planner, revival)
    controller = Controller(
        planner=planner,
        pool=pool,
        trainer=workers.trainer,
        publisher=publisher,
        phases=Phases(clock, sharing, policy=train_phase_policy(config, engines, pool)),
        evaluator=Evaluator(
            config.evaluation.sets,
            parts.inputs.evaluation,
            format=config.engine.formats,
            seed=config.seed,
            stop_token_ids=config.sampling.stop_token_ids,
            run_settings=run_settings(evaluation_of(config, config.model, config.engine)),
        ),
        recorder=recorder,
        algorithm=config.algorithm,
        settings=loop_settings(checked),
        history=parts.history,
        restarter=restarter,
        first_step=resume.first_step,
        repeated=parts.restarts.repeated,
        earlier=parts.restarts.totals,
        stop_requested=StopWatch(run_dir=parts.directory.path),
        guard=guard,
        check_places=parts.lost_engines.nodes.check_trainer,
    )
    return replace(attempt, controller=controller)


def _planner(config: RunConfig, inputs: Inputs, resume: ResumePoint) -> Planner:
    return Planner(
        training_order(inputs.training, config.data, seed=config.seed, state=resume.order),
        inputs.training.by_id(),
        config=config.planner,
        lengths=resume.lengths,
        num_steps=config.num_steps,
        prompts_per_step=config.algorithm.prompts_per_step,
        group_size=config.algorithm.group_size,
        sampling=sampling_spec(config),
        seed=config.seed,
        first_step=resume.first_step,
        refill=refill_rule(config),
    )


def _guard(parts: _Parts, resume: ResumePoint) -> Guard | None:
    config, recorder = parts.checked.config.algorithm.guard, parts.recorder
    if config.mode == "off":
        return None
    return Guard(config, parts.actions, resume.guard, report=lambda line: recorder.record_event("guard", line))


def _recorder(
    config: RunConfig,
    directory: RunDirectory,
    tracker: Tracker,
    shown: Shown,
    inputs: Inputs,
    engines: EngineGroup,
) -> RunRecorder:
    return RunRecorder(
        directory,
        tracker,
        shown.progress,
        status=shown.status,
        text_actor=inputs.text.text_actor,
        engines=engines,
        saves=Saves(directory, config.checkpoint, history=inputs.history, say=shown.progress.say),
        baseline_engines=config.history.baseline_engines if inputs.history is not None else (),
        table_rows=config.wandb.sample_rows,
        record_traces=config.history.record_traces,
    )


def _pool(parts: _Parts, engines: EngineGroup, planner: Planner, revival: EngineRevival) -> EnginePool:
    """The pool; groups migrate only if `planner.migration` is set and there is more than one engine."""
    config, recorder = parts.checked.config, parts.recorder
    migrates = config.planner.migration and config.engine.num_engines > 1
    rule = MigrationRule(remaining=planner.remaining, speed=lambda: recorder.engine_speed) if migrates else None
    sizes = [config.algorithm.group_size, *(each.samples_per_prompt for each in config.evaluation.sets.values())]
    return EnginePool(
        engines,
        parts.inputs.text.scorers,
        seats_per_engine=config.engine.max_num_seqs,
        batches=planner,
        whole_step=config.deterministic,
        migration=GroupMigration(rule=rule),
        revive=revival,
        watch=EngineWatch(engines, timeout_s=config.engine.progress_timeout_s),
        on_start=ignore_start if parts.history is None else parts.history.started,
        scoring_timeout_s=scoring_timeout_s(sizes, reward_timeout_s=config.reward.timeout_s),
    )


def _history_client(history: HistoryService | None, engines: EngineGroup) -> HistoryClient | None:
    if history is None:
        return None
    client = HistoryClient(history, engines)
    client.connect()
    return client


def _end(engines: EngineGroup, trainer: TrainerGroup, inputs: Inputs, running: Processes) -> None:
    running.end_trainer(trainer)
    if inputs.history is not None:
        running.end_history(inputs.history)
    kept = [actor for number, actor in enumerate(engines.actors) if number not in engines.retired]
    running.end([*kept, *inputs.text.actors])
