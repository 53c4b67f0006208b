"""`megatron-rl eval`: avg@k and pass@k of any Hugging Face directory, in BF16 engines.

Directories are evaluated in BF16 engines that load them by vLLM's own loader.

Used at the ends of a run, for the figures that are not coloured by 8-bit weights, and by
`megatron-rl eval`.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from launcher.cluster.processes import START_TIMEOUT_S, Actor, Processes, StartingEngines, processes
from launcher.commands.prompts import load_evaluation_prompts
from launcher.config.schema import EvalConfig, RunConfig
from launcher.errors import judging_user_input
from launcher.run_dir.console import RunProgress
from rollout.engine.spec import EngineSpec
from rollout.evaluation import EvaluationRow
from rollout.pool.engine_pool import EnginePool
from rollout.pool.evaluator import Evaluator
from rollout.types import EngineSlot, Prompt

EvaluationPrompts = dict[str, tuple[Prompt, ...]]
"""Of each set, by its name."""


def evaluation_of(config: RunConfig, model: str) -> EvalConfig:
    """A run's evaluation as a configuration of its own."""
    return EvalConfig(
        model=model,
        sets=config.evaluation.sets,
        max_prompt_tokens=config.data.max_prompt_tokens,
        engine=config.engine.model_copy(update={"format": "bf16"}),
        reward=config.reward,
        seed=config.seed,
        cluster=config.cluster,
    )


def evaluate_directories(
    config: RunConfig, models: Mapping[int, str], running: Processes, progress: RunProgress
) -> list[EvaluationRow]:
    """Evaluate one directory after another; `models` maps the finished steps of its weights to the directory.

    They share a tokenizer, and the run has read the prompts before: engines start while both are loaded again. Without
    GPUs, whose memory holds one engine, the next directory's engines start while this one's are evaluated.
    """
    evaluations = {step: evaluation_of(config, model) for step, model in models.items()}
    at_once = 1 if running.num_gpus_per_engine_rank else 2
    begun: dict[int, StartingEngines] = {}
    rows: list[EvaluationRow] = []
    text_actor: Actor | None = None
    prompts: EvaluationPrompts = {}
    for number, (step, evaluation) in enumerate(evaluations.items()):
        for ahead in list(evaluations)[number : number + at_once]:
            if ahead not in begun:
                begun[ahead] = _begin_engines(evaluations[ahead], running)
            if text_actor is None:  # before engines that nobody waits for take its place
                text_actor, prompts = _load_prompts(evaluation, running)
        assert text_actor is not None
        found = _evaluate(evaluation, begun[step], text_actor, prompts, progress, step=step)
        running.end(begun[step][0].actors)
        progress.evaluation(found)
        rows += found
    if text_actor is not None:
        running.end([text_actor])
    return rows


def evaluate_directory(
    config: EvalConfig, running: Processes, progress: RunProgress, *, step: int
) -> list[EvaluationRow]:
    """Read the prompts, start BF16 engines on one directory, sample and score every set, end them."""
    text_actor, prompts = _load_prompts(config, running)
    begun = _begin_engines(config, running)
    rows = _evaluate(config, begun, text_actor, prompts, progress, step=step)
    running.end([*begun[0].actors, text_actor])
    return rows


def _load_prompts(config: EvalConfig, running: Processes) -> tuple[Actor, EvaluationPrompts]:
    with judging_user_input():
        text_actor, _ = running.start_text_actor(config.model, config.reward)
        return text_actor, load_evaluation_prompts(text_actor, config.sets, config.max_prompt_tokens)


def _begin_engines(config: EvalConfig, running: Processes) -> StartingEngines:
    slots = [
        EngineSlot(
            engine_id=number,
            num_ranks=config.engine.tensor_parallel,
            cpu_cores=config.engine.cpu_cores,
            num_gpus=running.num_gpus_per_engine_rank,
        )
        for number in range(config.engine.num_engines)
    ]
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
    begun: StartingEngines,
    text_actor: Actor,
    prompts: EvaluationPrompts,
    progress: RunProgress,
    *,
    step: int,
) -> list[EvaluationRow]:
    engines, starting = begun
    engines.wait(starting, timeout_s=START_TIMEOUT_S)
    pool = EnginePool(engines, [text_actor], seats_per_engine=config.engine.max_num_seqs)
    evaluator = Evaluator(config.sets, prompts, format="bf16", seed=config.seed)
    return evaluator.evaluate(pool, step, progress=lambda done, total: progress.phase("evaluate", done, total))


def evaluate(config: EvalConfig) -> None:
    """Evaluate every set of `config`, print one line each and write `config.output` if it is named."""
    progress = RunProgress(0)
    with processes(config.cluster, num_actors=config.engine.num_engines + 1, log_dir=None) as running:
        rows = evaluate_directory(config, running, progress, step=0)
    progress.evaluation(rows)
    if config.output:
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([row.as_row() for row in rows], indent=1) + "\n", encoding="utf-8")
