"""`megatron-rl run`: puts a run together, runs it, evaluates its first and last weights, writes the report.

Everything is put together here and nowhere else, from what `launcher.commands.build` makes of the configuration; no
object gets the whole of that. A run directory that holds a checkpoint is resumed from it.
"""

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import ray

from history.lengths.book import LengthBook
from history.store.service import HistoryService
from launcher.cluster import placement
from launcher.cluster.engine_restarts import Crew
from launcher.cluster.node import describe, node_resources
from launcher.cluster.processes import START_TIMEOUT_S, Processes, processes
from launcher.commands.build import (
    device_turns,
    engine_specs,
    link_of,
    loop_settings,
    publish_plan,
    publisher_of,
    sampling_spec,
    sides,
    trainer_spec,
)
from launcher.commands.evaluate import evaluate_directories
from launcher.commands.history import start_drafting
from launcher.commands.prompts import load_evaluation_prompts, load_training_prompts, training_order
from launcher.config.loading import resolved_yaml
from launcher.config.schema import RunConfig
from launcher.errors import RunDirectoryError, judging_user_input
from launcher.report.write import write_report
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.recorder import HISTORY, LENGTHS, RunRecorder, read_state
from launcher.run_dir.resume import changed_keys
from launcher.run_dir.wandb import Tracker
from megatron_rl.batching.balance import load_kernels
from megatron_rl.controller.controller import Controller
from megatron_rl.controller.phases import Phases
from megatron_rl.trainer.group import TrainerGroup
from rollout.data.order import OrderState
from rollout.evaluation import EvaluationRow
from rollout.planning.migration import Mover
from rollout.planning.planner import Planner
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.pool.evaluator import Evaluator
from rollout.pool.history_client import HistoryLink
from rollout.types import Prompt

EXPORT = "policy"
"""Folder of the run directory with the last weights as a Hugging Face directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resume:
    """Where a run starts: at 0, or behind its newest checkpoint."""

    first_step: int = 0
    trainer: str = ""
    """Folder of the trainer's checkpoint."""
    history: str = ""
    """Folder of the history's snapshot; empty where the checkpoint has none."""
    lengths: Path | None = None
    """File of the book of lengths; None where the checkpoint has none."""
    order: OrderState | None = None


def run(config: RunConfig) -> None:
    """Run `config` to its end; see `docs/configuration.md` for what the run directory holds afterwards."""
    with RunDirectory(config.run_dir) as directory:
        resume = _resume(directory)
        changes = changed_keys(directory.path, config) if resume.first_step else []
        directory.write_config(resolved_yaml(config))
        directory.write_environment(describe())
        progress = RunProgress(config.num_steps)
        if resume.first_step:
            progress.say(f"resuming {config.run_dir} after step {resume.first_step}")
        for change in changes:
            progress.say(f"changed since the last start: {change}")
        slots = placement.plan(config, node_resources())
        for note in slots.notes:
            progress.say(note)
        log_dir = directory.path / "logs"
        with processes(config.cluster, num_actors=slots.num_actors, log_dir=log_dir) as running:
            if resume.first_step < config.num_steps:
                _train(config, directory, progress, running, slots, resume)
            if config.evaluation.sets and config.evaluation.bf16_before_after:
                _evaluate_ends(config, directory, progress, running)
        rows = [EvaluationRow.from_row(row) for row in directory.evaluation()]
        if rows:
            progress.table(rows)
        write_report(directory.path)
        progress.say(f"report: {directory.path / 'report.html'}")


def _resume(directory: RunDirectory) -> _Resume:
    newest = directory.latest_checkpoint()
    if newest is None:
        directory.resume_at(0)
        return _Resume()
    step, folder = newest
    directory.resume_at(step)
    try:
        order = read_state(folder)["prompt_order"]
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(
            f"checkpoint {folder} has no readable state ({type(error).__name__}: {error}); remove that folder and "
            "`latest` beside it to resume from the one before"
        ) from error
    assert isinstance(order, dict)
    return _Resume(
        first_step=step,
        trainer=str(folder / "trainer"),
        history=str(folder / HISTORY) if (folder / HISTORY).exists() else "",
        lengths=folder / LENGTHS if (folder / LENGTHS).exists() else None,
        order=OrderState.from_json(order),
    )


def _train(
    config: RunConfig,
    directory: RunDirectory,
    progress: RunProgress,
    running: Processes,
    slots: placement.Placement,
    resume: _Resume,
) -> None:
    run_id = secrets.token_hex(4)
    with judging_user_input():
        scorer, tokenizer = running.start_scorer(config.model, config.reward)
        training = load_training_prompts(scorer, config.data)
        evaluation = load_evaluation_prompts(scorer, config.evaluation.sets, config.data.max_prompt_tokens)
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
    specs = engine_specs(config, run_id)
    engines, starting = running.begin_engines(specs, slots.engines)
    if config.engine.sleep_level:  # both at once would need room for both
        engines.wait(starting, "start", timeout_s=START_TIMEOUT_S)
        engines.call("sleep", timeout_s=START_TIMEOUT_S)
    load_kernels()  # while the engines start
    trainer = running.start_trainer(trainer_spec(config, run_id), slots.trainers)
    if resume.trainer:
        trainer.load(resume.trainer)
    engines.wait(starting, "start", timeout_s=START_TIMEOUT_S)
    _say_kernels(engines, progress)
    history_link = _history_link(history, engines)
    turns = device_turns(config, trainer, engines)
    plan = publish_plan(config, trainer, engines)
    link = link_of(config, trainer, engines, slots, plan)
    link.connect()
    publisher = publisher_of(config, trainer, engines, link, plan, run_id, turns)
    planner = Planner(
        order,
        training.by_id(),
        config=config.planner,
        lengths=_lengths(resume),
        num_steps=config.num_steps,
        prompts_per_step=config.algorithm.prompts_per_step,
        group_size=config.algorithm.group_size,
        sampling=sampling_spec(config),
        seed=config.seed,
        first_step=resume.first_step,
    )
    pool = EnginePool(
        engines,
        [scorer],
        slots_per_engine=config.engine.max_num_seqs,
        batches=planner,
        whole_step=config.deterministic,
    )
    tracker = Tracker.start(config.wandb, directory.path, config.model_dump(mode="json"))
    recorder = RunRecorder(
        directory,
        tracker,
        progress,
        scorer=scorer,
        engines=engines,
        history=history,
        baseline_engines=config.history.baseline_engines if history is not None else (),
        table_rows=config.wandb.sample_rows,
        record_traces=config.history.record_traces,
        keep_last=config.checkpoint.keep_last,
    )
    if config.planner.migration and config.engine.num_engines > 1:
        pool.moves.mover = Mover(remaining=planner.remaining, speed=lambda: recorder.engine_speed)
    controller = Controller(
        planner=planner,
        pool=pool,
        trainer=trainer,
        publisher=publisher,
        phases=Phases(recorder.record_span, turns, sides=sides(config, engines, pool)),
        evaluator=_evaluator(config, evaluation),
        recorder=recorder,
        algorithm=config.algorithm,
        settings=loop_settings(config),
        history=history_link,
        crew=Crew(
            running=running,
            engines=engines,
            specs=specs,
            slots=slots.engines,
            link=link,
            history=history_link,
            max_restarts=config.engine.max_restarts,
            say=progress.say,
        ),
        first_step=resume.first_step,
    )
    try:
        controller.run()
        recorder.flush()
    finally:
        progress.close()
        tracker.finish()
    _export(trainer, directory.path)
    running.end_trainer(trainer)
    if history is not None:
        running.end_history(history)
    running.end([*engines.actors, scorer])


def _lengths(resume: _Resume) -> LengthBook:
    book = LengthBook()
    if resume.lengths is not None:
        book.load(resume.lengths)
    return book


def _history_link(history: HistoryService | None, engines: EngineGroup) -> HistoryLink | None:
    if history is None:
        return None
    link = HistoryLink(history, engines)
    link.connect()
    return link


def _evaluator(config: RunConfig, prompts: dict[str, tuple[Prompt, ...]]) -> Evaluator:
    return Evaluator(config.evaluation.sets, prompts, format=config.engine.format, seed=config.seed)


def _say_kernels(engines: EngineGroup, progress: RunProgress) -> None:
    """Say which kernels multiply, so that INT8 is seen to be INT8, and whether they are right."""
    refs: list[dict[str, str]] = ray.get(engines.begin("kernel_classes"))
    for number, kernels in enumerate(refs):
        counts = {kernel: list(kernels.values()).count(kernel) for kernel in sorted(set(kernels.values()))}
        progress.say(f"engine {number}: " + ", ".join(f"{count} x {kernel}" for kernel, count in counts.items()))
    notes: list[list[str]] = ray.get(engines.begin("kernel_notes"))
    for note in sorted({note for engine in notes for note in engine}):
        progress.say(note)


def _export(trainer: TrainerGroup, run_dir: Path) -> None:
    """Write the last weights aside, then put them where an earlier export of this run was."""
    target, partial = run_dir / EXPORT, run_dir / f"{EXPORT}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    trainer.export(str(partial))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _evaluate_ends(config: RunConfig, directory: RunDirectory, progress: RunProgress, running: Processes) -> None:
    """Evaluate the weights of before the first and after the last step in BF16 engines, once."""
    have = {(row["format"], row["step"]) for row in directory.evaluation()}
    wanted = {0: config.model, config.num_steps: str(directory.path / EXPORT)}
    missing = {step: model for step, model in wanted.items() if ("bf16", step) not in have}
    rows = evaluate_directories(config, missing, running, progress)
    directory.append_evaluation([row.as_row() for row in rows])
