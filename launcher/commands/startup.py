"""Starts the processes of a run: text actor, scorers and history with the prompts, then engines and trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from history.store.service import HistoryService
from launcher.checks.check import CheckedRun
from launcher.cluster.processes import START_TIMEOUT_S, Processes
from launcher.cluster.text_processes import TextProcesses
from launcher.commands.history import data_epochs, fill_history, small_budget, start_history
from launcher.commands.prompts import (
    TrainingPrompts,
    changed_answers,
    load_evaluation_prompts,
    load_training_prompts,
    training_order,
)
from launcher.commands.resume_point import ResumePoint
from launcher.commands.specs import engine_specs, trainer_spec
from launcher.errors import RunDirectoryError, judging_user_input
from launcher.run_dir.checkpoints import Checkpoints
from launcher.run_dir.console import RunProgress
from megatron_rl.batching.balance import load_kernels
from megatron_rl.checkpoints.damage import DamagedCheckpointError
from megatron_rl.trainer.group import TrainerGroup
from rollout.data.tokenizer import TokenizerSource
from rollout.engine.spec import EngineSpec
from rollout.failures import CallError
from rollout.pool.engine_group import EngineGroup
from rollout.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Prompts and history of a run."""

    text: TextProcesses
    training: TrainingPrompts
    evaluation: dict[str, tuple[Prompt, ...]]
    history: HistoryService | None
    """None if no engine drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Engines and trainer, ready; the engines have no weights yet."""

    run_id: str
    specs: list[EngineSpec]
    """Specifications of the engines, by number."""
    engines: EngineGroup
    trainer: TrainerGroup


def read_inputs(
    checked: CheckedRun, running: Processes, resume: ResumePoint, run_id: str, progress: RunProgress
) -> Inputs:
    """Read and tokenise all prompts, and start the history.

    Raises:
        LaunchError: the input cannot be used, or the checkpoint was made with other prompts.
    """
    config = checked.config
    with judging_user_input():
        tokenizer = TokenizerSource(directory=config.model, template_arguments=config.data.chat_template_arguments)
        text = running.start_text_processes(tokenizer, config.reward, checked.placement.scorers)
        training = load_training_prompts(text.text_actor, config.data, groups_per_step=config.algorithm.max_groups)
        # every trainer gets an order of its own; this one refuses a checkpoint of other prompts before engines start
        order = training_order(training, config.data, seed=config.seed, state=resume.order)
        evaluation = load_evaluation_prompts(text.text_actor, config.evaluation.sets, config.data.max_prompt_tokens)
        history = start_history(config, running, text.tokenizer, run_id=run_id, say=progress.say)
        if history is not None:
            evaluated = {prompt.prompt_id: prompt for prompts in evaluation.values() for prompt in prompts}
            prompts = {**evaluated, **training.by_id()}
            history.note_epochs(data_epochs(config, training))
            fill_history(history, config.history, prompts, snapshot=resume.history, say=progress.say)
    for line in (*training.lines(), *changed_answers(training, order), small_budget(config, len(training.by_id()))):
        if line:
            progress.say(line)
    return Inputs(text=text, training=training, evaluation=evaluation, history=history)


def start_workers(
    checked: CheckedRun, running: Processes, resume: ResumePoint, run_id: str, progress: RunProgress
) -> Workers:
    """Start engines and trainer at the same time, and load the trainer's checkpoint if there is one."""
    config, slots = checked.config, checked.placement
    specs = engine_specs(config, run_id)
    engines, starting = running.begin_engines(specs, slots.engines)
    if config.engine.sleep_level:  # engine and trainer do not fit in memory together
        engines.finish_start(starting, timeout_s=config.engine.start_timeout_s)
        engines.sleep(timeout_s=START_TIMEOUT_S)
    load_kernels()  # while the engines start
    trainer = start_trainer(checked, running, resume, run_id)
    engines.finish_start(starting, timeout_s=config.engine.start_timeout_s)
    running.check_engines(engines, slots.engines)
    _say_kernels(engines, progress)
    return Workers(run_id=run_id, specs=specs, engines=engines, trainer=trainer)


def start_trainer(checked: CheckedRun, running: Processes, resume: ResumePoint, run_id: str) -> TrainerGroup:
    """Start all trainer ranks, and load the checkpoint if there is one; errors of `judging_checkpoint`."""
    placement = checked.placement
    spec = trainer_spec(checked.config, checked.format, run_id, declines_delta=placement.declines_delta)
    trainer = running.start_trainer(spec, placement.trainers)
    if resume.trainer:
        with judging_checkpoint(resume):
            trainer.load(resume.trainer)
    return trainer


@contextmanager
def judging_checkpoint(resume: ResumePoint) -> Iterator[None]:
    """The body reads the trainer's part of a checkpoint.

    Raises:
        RunDirectoryError: the checkpoint is damaged, or does not fit the configuration.
    """
    try:
        yield
    except CallError as error:
        if (damage := damage_of(error)) is not None:
            folder = Path(resume.trainer).parent
            advice = Checkpoints(folder.parent).instead_of(resume.first_step)
            raise RunDirectoryError(f"checkpoint {folder} cannot be used: {damage}; {advice}") from error
        if not isinstance(error.__cause__, ValueError):
            raise
        raise RunDirectoryError(str(error)) from error


def damage_of(error: CallError) -> DamagedCheckpointError | None:
    """The damage that a trainer rank has found in its checkpoint, if that is the error, without Ray's wrapping."""
    cause = getattr(error.__cause__, "cause", error.__cause__)
    return cause if isinstance(cause, DamagedCheckpointError) else None


def _say_kernels(engines: EngineGroup, progress: RunProgress) -> None:
    """Print the kernels of each engine's linear layers, and the results of their tests."""
    for number, kernels in engines.kernel_classes(timeout_s=START_TIMEOUT_S).items():
        counts = {kernel: list(kernels.values()).count(kernel) for kernel in sorted(set(kernels.values()))}
        progress.say(f"engine {number}: " + ", ".join(f"{count} x {kernel}" for kernel, count in counts.items()))
    notes = engines.kernel_notes(timeout_s=START_TIMEOUT_S)
    for note in sorted({note for of_engine in notes.values() for note in of_engine}):
        progress.say(note)
