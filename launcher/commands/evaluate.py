"""`megatron-rl eval`: avg@k and pass@k of any Hugging Face directory.

BF16 engines load the directory with vLLM's own loader. A run evaluates its first and last weights the same way, to
measure them without the error of 8-bit weights.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.checks.kv_cache import evaluation_engine
from launcher.cluster.node import NodeResources
from launcher.cluster.placement import in_turn, plan_evaluation
from launcher.cluster.processes import Actor, Processes, StartingEngines, processes
from launcher.cluster.text_processes import TextProcesses
from launcher.commands.prompts import load_evaluation_prompts
from launcher.config.schema import EvalConfig, RunConfig
from launcher.endings.conclusion import logs_beside
from launcher.errors import judging_user_input
from launcher.run_dir.console import RunProgress
from megatron_rl.model.spec import read_model_spec
from rollout.config import EngineConfig, EvalSetConfig
from rollout.data.tokenizer import TokenizerSource
from rollout.engine.spec import EngineSpec
from rollout.evaluation import EvaluationRow, run_settings_digest
from rollout.pool.callbacks import Progress
from rollout.pool.engine_pool import EnginePool
from rollout.pool.engine_watch import EngineWatch
from rollout.pool.evaluator import Evaluator
from rollout.pool.scorer_pool import scoring_timeout_s
from rollout.types import Prompt

EvaluationPrompts = dict[str, tuple[Prompt, ...]]
"""Prompts of each evaluation set, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a run that are to be evaluated."""

    directory: str
    """A Hugging Face directory."""
    sets: Mapping[str, EvalSetConfig]
    """Evaluation sets by name, one at least."""


def evaluation_of(config: RunConfig, model: str, engine: EngineConfig) -> EvalConfig:
    """The configuration of `eval` with a run's evaluation sets."""
    return EvalConfig(
        model=model,
        sets=config.evaluation.sets,
        max_prompt_tokens=config.data.max_prompt_tokens,
        chat_template_arguments=config.data.chat_template_arguments,
        engine=engine,
        reward=config.reward,
        seed=config.seed,
        stop_token_ids=config.sampling.stop_token_ids,
        cluster=config.cluster,
    )


def run_settings(config: EvalConfig) -> str:
    """Digest of the settings that all sets of an evaluation share (`rollout.evaluation.EvaluationRow`)."""
    return run_settings_digest(
        template_arguments=config.chat_template_arguments,
        stop_token_ids=config.stop_token_ids,
        reward_function=config.reward.function,
    )


def evaluate_directories(
    config: RunConfig,
    models: Mapping[int, Weights],
    running: Processes,
    progress: RunProgress,
    check: Callable[[], None],
) -> Iterator[list[EvaluationRow]]:
    """Evaluate one directory after another on its own sets, and yield the rows of each.

    All directories have the run's tokenizer and prompts, which load while the first engines start. On CPUs the next
    directory's engines start during an evaluation; the memory of a GPU holds the engines of one directory only.

    Args:
        config: of the run.
        models: weights after each number of finished steps.
        running: starts the processes; if this function is left early, their end is left to it.
        progress: console.
        check: called before each directory, and whenever a prompt is scored; leaves the evaluation if it raises.
    """
    engine = evaluation_engine(config, read_model_spec(Path(config.model)), running.nodes)
    if engine.kv_cache_bytes < config.engine.kv_cache_bytes:
        progress.say(
            f"the engines of the BF16 evaluation have a KV cache of {engine.kv_cache_bytes / 2**30:.1f} GiB instead of "
            f"{config.engine.kv_cache_bytes / 2**30:.1f}, because BF16 weights are larger"
        )
    every_set = evaluation_of(config, config.model, engine)
    evaluations = {
        step: every_set.model_copy(update={"model": weights.directory, "sets": dict(weights.sets)})
        for step, weights in models.items()
    }
    at_once = 1 if any(node.gpu_bytes for node in running.nodes) else 2
    started: dict[int, StartingEngines] = {}
    text: TextProcesses | None = None
    prompts: EvaluationPrompts = {}

    def on_progress(done: int, total: int) -> None:
        progress.phase("evaluate", done, total)
        if done < total:  # a whole evaluation is not thrown away
            check()

    for number, (step, evaluation) in enumerate(evaluations.items()):
        check()
        for ahead in list(evaluations)[number : number + at_once]:
            if ahead not in started:
                started[ahead] = _begin_engines(evaluations[ahead], running)
            if text is None:  # before the second directory's engines take the cores
                text, prompts = _load_prompts(every_set, running)
        assert text is not None
        rows = _evaluate(evaluation, started[step], text.scorers, prompts, on_progress, step=step)
        running.end(started[step][0].actors)
        progress.evaluation(rows)
        yield rows
    if text is not None:
        running.end(text.actors)


def evaluate_directory(
    config: EvalConfig, running: Processes, progress: RunProgress, *, step: int
) -> list[EvaluationRow]:
    """Read the prompts, start BF16 engines on one directory, sample and score every set, end the engines."""
    text, prompts = _load_prompts(config, running)
    started = _begin_engines(config, running)
    rows = _evaluate(config, started, text.scorers, prompts, partial(progress.phase, "evaluate"), step=step)
    running.end([*started[0].actors, *text.actors])
    return rows


def _load_prompts(config: EvalConfig, running: Processes) -> tuple[TextProcesses, EvaluationPrompts]:
    with judging_user_input():
        scorers = in_turn(config.reward.num_scorers, [node.name for node in running.nodes])
        tokenizer = TokenizerSource(directory=config.model, template_arguments=config.chat_template_arguments)
        text = running.start_text_processes(tokenizer, config.reward, scorers)
        return text, load_evaluation_prompts(text.text_actor, config.sets, config.max_prompt_tokens)


def _begin_engines(config: EvalConfig, running: Processes) -> StartingEngines:
    slots = plan_evaluation(config.engine, running.nodes)
    longest = max(evaluation_set.max_response_tokens for evaluation_set in config.sets.values())
    specs = [
        EngineSpec(
            engine_id=slot.engine_id,
            run_id="evaluation",
            config=config.engine,
            directory=config.model,
            max_model_len=config.max_prompt_tokens + longest,
            load_from_directory=True,
        )
        for slot in slots
    ]
    return running.begin_engines(specs, slots)


def _evaluate(
    config: EvalConfig,
    started: StartingEngines,
    scorers: Sequence[Actor],
    prompts: EvaluationPrompts,
    progress: Progress,
    *,
    step: int,
) -> list[EvaluationRow]:
    engines, starting = started
    engines.finish_start(starting, timeout_s=config.engine.start_timeout_s)
    pool = EnginePool(
        engines,
        scorers,
        seats_per_engine=config.engine.max_num_seqs,
        watch=EngineWatch(engines, timeout_s=config.engine.progress_timeout_s),
        scoring_timeout_s=scoring_timeout_s(
            [each.samples_per_prompt for each in config.sets.values()], reward_timeout_s=config.reward.timeout_s
        ),
    )
    evaluator = Evaluator(
        config.sets,
        prompts,
        format="bf16",
        seed=config.seed,
        stop_token_ids=config.stop_token_ids,
        run_settings=run_settings(config),
    )
    return evaluator.evaluate(pool, step, progress=progress)


def evaluate(config: EvalConfig, nodes: Sequence[NodeResources]) -> None:
    """Evaluate every set of `config`, print one line each and write `config.output` unless it is empty."""
    progress = RunProgress(0)
    slots = plan_evaluation(config.engine, nodes)
    with_engine = dict.fromkeys([nodes[0].name, *[slot.node for slot in slots]])
    scorers = in_turn(config.reward.num_scorers, list(with_engine))
    placed = Counter([nodes[0].name, *scorers, *[slot.node for slot in slots]])
    num_actors = len(slots) + len(scorers) + 1
    logs = logs_beside(Path(config.output)) if config.output else None
    with processes(config.cluster, num_actors=num_actors, log_dir=logs, nodes=nodes, placed=placed) as running:
        rows = evaluate_directory(config, running, progress, step=0)
    progress.evaluation(rows)
    if config.output:
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([row.as_row() for row in rows], indent=1) + "\n", encoding="utf-8")
