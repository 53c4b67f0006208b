"""Assembles a run: constructs its parts from the started processes and from the parts that they depend on.

This is the only place of assembly. `launcher.commands.specs` and `launcher.commands.build` turn the configuration into
the values of each part, so that no part gets the whole configuration.
"""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from history.lengths.book import LengthBook
from history.store.service import HistoryService
from launcher.checks.check import CheckedRun
from launcher.cluster.engine_restarts import EngineRestarter
from launcher.cluster.processes import Actor, Processes
from launcher.commands.build import (
    build_delivery,
    build_publisher,
    device_sharing,
    loop_settings,
    publish_plan,
    train_phase_policy,
)
from launcher.commands.resume_point import ResumePoint
from launcher.commands.specs import sampling_spec
from launcher.commands.startup import Inputs, Workers, read_inputs, start_workers
from launcher.config.schema import RunConfig
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.recorder import RunRecorder
from launcher.run_dir.status import StatusFile
from launcher.run_dir.stop_request import StopWatch
from launcher.run_dir.wandb import Tracker
from megatron_rl.controller.controller import Controller
from megatron_rl.controller.engine_revival import EngineRevival
from megatron_rl.controller.phases import PhaseClock, Phases
from megatron_rl.trainer.group import TrainerGroup
from rollout.planning.migration import GroupMigration, MigrationRule
from rollout.planning.planner import Planner
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.pool.engine_watch import EngineWatch
from rollout.pool.evaluator import Evaluator
from rollout.pool.history_client import HistoryClient
from rollout.pool.scorer_pool import scoring_timeout_s

EXPORT = "policy"
"""Folder of the run directory with the last weights as a Hugging Face directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a person sees of a run: the console, and `status.json` for other machines."""

    progress: RunProgress
    status: StatusFile


@contextmanager
def build(
    checked: CheckedRun, directory: RunDirectory, shown: Shown, running: Processes, resume: ResumePoint
) -> Iterator[Controller]:
    """Start the processes of a run and construct its controller; end them if the body succeeds, else `running` does."""
    config, run_id = checked.config, secrets.token_hex(4)
    progress, status = shown.progress, shown.status
    status.phase("scorer", "load prompts")
    inputs = read_inputs(config, running, resume, run_id, progress)
    status.phase("engines and trainer", "start")
    workers = start_workers(checked, running, resume, run_id, progress)
    engines, trainer = workers.engines, workers.trainer
    history = _history_client(inputs.history, engines)
    sharing = device_sharing(config, trainer, engines)
    plan = publish_plan(checked, workers)
    delivery = build_delivery(checked, workers, plan)
    delivery.connect()
    planner = _planner(config, inputs, resume)
    tracker = Tracker.start(config.wandb, directory.path, config.model_dump(mode="json"))
    recorder = _recorder(config, directory, tracker, shown, inputs, engines)
    publisher = build_publisher(checked, workers, delivery, plan, sharing)
    restarter = EngineRestarter(
        running=running,
        engines=engines,
        specs=workers.specs,
        slots=checked.placement.engines,
        delivery=delivery,
        history=history,
        sharing=sharing,
        max_restarts=config.engine.max_restarts,
        say=progress.say,
    )
    clock = PhaseClock(recorder.record_span, recorder.begin_phase)
    revival = EngineRevival(restarter=restarter, publisher=publisher, clock=clock, sharing=sharing)
    pool = _pool(config, engines, inputs.text_actor, planner, recorder, revival)
    controller = Controller(
        planner=planner,
        pool=pool,
        trainer=trainer,
        publisher=publisher,
        phases=Phases(clock, sharing, policy=train_phase_policy(config, engines, pool)),
        evaluator=Evaluator(config.evaluation.sets, inputs.evaluation, format=config.engine.format, seed=config.seed),
        recorder=recorder,
        algorithm=config.algorithm,
        settings=loop_settings(checked),
        history=history,
        restarter=restarter,
        first_step=resume.first_step,
        stop_requested=StopWatch(run_dir=directory.path),
    )
    try:
        yield controller
        recorder.finish()
    finally:
        progress.close()
        tracker.finish()
        status.phase("controller", "end processes")
    _export(trainer, directory.path)
    _end(workers, inputs, running)


def _planner(config: RunConfig, inputs: Inputs, resume: ResumePoint) -> Planner:
    return Planner(
        inputs.order,
        inputs.training.by_id(),
        config=config.planner,
        lengths=_lengths(resume),
        num_steps=config.num_steps,
        prompts_per_step=config.algorithm.prompts_per_step,
        group_size=config.algorithm.group_size,
        sampling=sampling_spec(config),
        seed=config.seed,
        first_step=resume.first_step,
    )


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
        text_actor=inputs.text_actor,
        engines=engines,
        history=inputs.history,
        baseline_engines=config.history.baseline_engines if inputs.history is not None else (),
        table_rows=config.wandb.sample_rows,
        record_traces=config.history.record_traces,
        keep_last=config.checkpoint.keep_last,
    )


def _pool(
    config: RunConfig,
    engines: EngineGroup,
    text_actor: Actor,
    planner: Planner,
    recorder: RunRecorder,
    revival: EngineRevival,
) -> EnginePool:
    """The pool; groups migrate only if `planner.migration` is set and there is more than one engine."""
    migrates = config.planner.migration and config.engine.num_engines > 1
    rule = MigrationRule(remaining=planner.remaining, speed=lambda: recorder.engine_speed) if migrates else None
    sizes = [config.algorithm.group_size, *(each.samples_per_prompt for each in config.evaluation.sets.values())]
    return EnginePool(
        engines,
        [text_actor],
        seats_per_engine=config.engine.max_num_seqs,
        batches=planner,
        whole_step=config.deterministic,
        migration=GroupMigration(rule=rule),
        revive=revival,
        watch=EngineWatch(engines, timeout_s=config.engine.progress_timeout_s),
        scoring_timeout_s=scoring_timeout_s(sizes, reward_timeout_s=config.reward.timeout_s),
    )


def _lengths(resume: ResumePoint) -> LengthBook:
    book = LengthBook()
    if resume.lengths is not None:
        book.load(resume.lengths)
    return book


def _history_client(history: HistoryService | None, engines: EngineGroup) -> HistoryClient | None:
    if history is None:
        return None
    client = HistoryClient(history, engines)
    client.connect()
    return client


def _end(workers: Workers, inputs: Inputs, running: Processes) -> None:
    running.end_trainer(workers.trainer)
    if inputs.history is not None:
        running.end_history(inputs.history)
    running.end([*workers.engines.actors, inputs.text_actor])


def _export(trainer: TrainerGroup, run_dir: Path) -> None:
    """Write the last weights to a partial folder, then replace the earlier export of this run."""
    target, partial = run_dir / EXPORT, run_dir / f"{EXPORT}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    trainer.export(str(partial))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
