"""Puts a run together: starts its processes and builds its parts, each from what it depends on.

Everything is put together here and nowhere else, from what `launcher.commands.build` makes of the configuration; no
object gets the whole of that.
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
from launcher.cluster.processes import START_TIMEOUT_S, Actor, Processes
from launcher.commands.build import (
    build_delivery,
    build_publisher,
    device_sharing,
    engine_specs,
    loop_settings,
    publish_plan,
    sampling_spec,
    train_phase_policy,
    trainer_spec,
)
from launcher.commands.history import start_drafting
from launcher.commands.prompts import TrainingPrompts, load_evaluation_prompts, load_training_prompts, training_order
from launcher.config.schema import RunConfig
from launcher.errors import judging_user_input
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.recorder import RunRecorder
from launcher.run_dir.wandb import Tracker
from megatron_rl.batching.balance import load_kernels
from megatron_rl.controller.controller import Controller
from megatron_rl.controller.delivery import WeightDelivery
from megatron_rl.controller.engine_revival import EngineRevival
from megatron_rl.controller.phases import PhaseClock, Phases
from megatron_rl.trainer.group import TrainerGroup
from rollout.data.order import OrderState, PromptOrder
from rollout.engine.spec import EngineSpec
from rollout.planning.migration import GroupMigration, MigrationRule
from rollout.planning.planner import Planner
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.pool.evaluator import Evaluator
from rollout.pool.history_client import HistoryClient
from rollout.types import Prompt

EXPORT = "policy"
"""Folder of the run directory with the last weights as a Hugging Face directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run starts: at 0, or behind its newest checkpoint."""

    first_step: int = 0
    trainer: str = ""
    """Folder of the trainer's checkpoint."""
    history: str = ""
    """Folder of the history's snapshot; empty where the checkpoint has none."""
    lengths: Path | None = None
    """File of the book of lengths; None where the checkpoint has none."""
    order: OrderState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What a run samples and remembers."""

    text_actor: Actor
    training: TrainingPrompts
    evaluation: dict[str, tuple[Prompt, ...]]
    order: PromptOrder
    history: HistoryService | None
    """None where no engine drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workers:
    """Engines and trainer, both ready; engines have no weights."""

    specs: list[EngineSpec]
    engines: EngineGroup
    trainer: TrainerGroup


@contextmanager
def build(
    checked: CheckedRun, directory: RunDirectory, progress: RunProgress, running: Processes, resume: Resume
) -> Iterator[Controller]:
    """Start the processes of a run and put its parts together; its processes are ended where the body has not failed.

    Whatever the body does, the console and wandb are closed; a body that fails leaves processes to `running`.
    """
    config, run_id = checked.config, secrets.token_hex(4)
    inputs = _read_inputs(config, running, resume, run_id, progress)
    workers = _start_workers(checked, running, resume, run_id, progress)
    engines, trainer = workers.engines, workers.trainer
    history = _history_client(inputs.history, engines)
    sharing = device_sharing(config, trainer, engines)
    plan = publish_plan(checked, trainer, engines)
    delivery = build_delivery(checked, trainer, engines, plan)
    delivery.connect()
    planner = _planner(config, inputs, resume)
    tracker = Tracker.start(config.wandb, directory.path, config.model_dump(mode="json"))
    recorder = _recorder(config, directory, tracker, progress, inputs, engines)
    publisher = build_publisher(checked, trainer, engines, delivery, plan, run_id, sharing)
    restarter = _restarter(checked, running, workers, delivery, history, progress)
    clock = PhaseClock(recorder.record_span)
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
    )
    try:
        yield controller
        recorder.flush()
    finally:
        progress.close()
        tracker.finish()
    _export(trainer, directory.path)
    running.end_trainer(trainer)
    if inputs.history is not None:
        running.end_history(inputs.history)
    running.end([*engines.actors, inputs.text_actor])


def _read_inputs(config: RunConfig, running: Processes, resume: Resume, run_id: str, progress: RunProgress) -> _Inputs:
    """Read and tokenise all prompts, and begin with the history that there is; user input is refused here."""
    with judging_user_input():
        text_actor, tokenizer = running.start_text_actor(config.model, config.reward)
        training = load_training_prompts(text_actor, config.data)
        evaluation = load_evaluation_prompts(text_actor, config.evaluation.sets, config.data.max_prompt_tokens)
        order = training_order(training, config.data, seed=config.seed, state=resume.order)
        evaluated = {prompt.prompt_id: prompt for prompts in evaluation.values() for prompt in prompts}
        history = start_drafting(
            config,
            running,
            tokenizer,
            {**evaluated, **training.by_id()},
            run_id=run_id,
            snapshot=resume.history,
            say=progress.say,
        )
    for line in training.lines():
        progress.say(line)
    return _Inputs(text_actor=text_actor, training=training, evaluation=evaluation, order=order, history=history)


def _start_workers(
    checked: CheckedRun, running: Processes, resume: Resume, run_id: str, progress: RunProgress
) -> _Workers:
    """Start engines and trainer beside each other, and load the trainer's checkpoint if there is one."""
    config, slots = checked.config, checked.placement
    specs = engine_specs(config, run_id)
    engines, starting = running.begin_engines(specs, slots.engines)
    if config.engine.sleep_level:  # both at once would need room for both
        engines.wait(starting, timeout_s=START_TIMEOUT_S)
        engines.sleep(timeout_s=START_TIMEOUT_S)
    load_kernels()  # while the engines start
    trainer = running.start_trainer(trainer_spec(config, checked.format, run_id), slots.trainers)
    if resume.trainer:
        trainer.load(resume.trainer)
    engines.wait(starting, timeout_s=START_TIMEOUT_S)
    _say_kernels(engines, progress)
    return _Workers(specs=specs, engines=engines, trainer=trainer)


def _planner(config: RunConfig, inputs: _Inputs, resume: Resume) -> Planner:
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
    progress: RunProgress,
    inputs: _Inputs,
    engines: EngineGroup,
) -> RunRecorder:
    return RunRecorder(
        directory,
        tracker,
        progress,
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
    """Groups move between engines only where the configuration wants it and there is more than one engine."""
    moves = config.planner.migration and config.engine.num_engines > 1
    rule = MigrationRule(remaining=planner.remaining, speed=lambda: recorder.engine_speed) if moves else None
    return EnginePool(
        engines,
        [text_actor],
        seats_per_engine=config.engine.max_num_seqs,
        batches=planner,
        whole_step=config.deterministic,
        migration=GroupMigration(rule=rule),
        revive=revival,
    )


def _restarter(
    checked: CheckedRun,
    running: Processes,
    workers: _Workers,
    delivery: WeightDelivery,
    history: HistoryClient | None,
    progress: RunProgress,
) -> EngineRestarter:
    return EngineRestarter(
        running=running,
        engines=workers.engines,
        specs=workers.specs,
        slots=checked.placement.engines,
        delivery=delivery,
        history=history,
        max_restarts=checked.config.engine.max_restarts,
        say=progress.say,
    )


def _lengths(resume: Resume) -> LengthBook:
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


def _say_kernels(engines: EngineGroup, progress: RunProgress) -> None:
    """Say which kernels multiply, so that INT8 is seen to be INT8, and whether they are right."""
    for number, kernels in engines.kernel_classes(timeout_s=START_TIMEOUT_S).items():
        counts = {kernel: list(kernels.values()).count(kernel) for kernel in sorted(set(kernels.values()))}
        progress.say(f"engine {number}: " + ", ".join(f"{count} x {kernel}" for kernel, count in counts.items()))
    notes = engines.kernel_notes(timeout_s=START_TIMEOUT_S)
    for note in sorted({note for of_engine in notes.values() for note in of_engine}):
        progress.say(note)


def _export(trainer: TrainerGroup, run_dir: Path) -> None:
    """Write the last weights aside, then put them where an earlier export of this run was."""
    target, partial = run_dir / EXPORT, run_dir / f"{EXPORT}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    trainer.export(str(partial))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
