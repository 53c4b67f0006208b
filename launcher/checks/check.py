"""Refuses configurations that cannot run, before any process starts: impossible combinations of keys, missing files,
bad rows, a model that the partition does not divide, too little memory.

One `ConfigError` lists every problem. A check that needs a missing file is left out. Nothing here imports torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from history.store.warm_start import warm_start_problems
from launcher.checks.algorithm import algorithm_warnings
from launcher.checks.combinations import checkpoint_warnings, evaluation_sets, run_combinations, schedule_problems
from launcher.checks.deadlines import deadline_problems, deadline_warnings
from launcher.checks.engine_arguments import engine_arguments, run_arguments
from launcher.checks.files import broken_json, prompt_file, sft_file, tokenizer_problems, training_files
from launcher.checks.fit import fit
from launcher.checks.formats import weight_format_warnings
from launcher.checks.fp8 import fp8_warnings
from launcher.checks.functions import function_problems
from launcher.checks.memory import MemoryPlan, allocator_problems, sft_memory, store_warnings
from launcher.checks.model import (
    engine_problems,
    forward_problems,
    response_lengths,
    sft_problems,
    stop_token_problems,
)
from launcher.checks.paths import file_problems, folder_problems, path_problems, warm_start_target
from launcher.cluster.node import NodeResources
from launcher.cluster.placement import Placement, plan_sft
from launcher.config.loading import listing
from launcher.config.schema import EvalConfig, RunConfig, SftConfig
from launcher.errors import ConfigError
from launcher.estimate.trainer_kernels import attention_warnings, installed_flash_attention
from megatron_rl.batching.cost_model import CostModel, cost_model
from megatron_rl.model.spec import ModelSpec, read_model_spec
from megatron_rl.ranks import TrainerRank
from megatron_rl.weights.weight_files import check_shapes, check_tied_output, directory_tensors
from rollout.config import EvalSetConfig
from rollout.weights.format import WeightFormat

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run that can be started, with all facts that its checks have read or computed, so that each is read once."""

    given: RunConfig
    """The configuration that was checked; `engine.gpu_memory_fraction` may leave the KV cache open."""
    config: RunConfig
    """With the size of the KV cache (`launcher.checks.kv_cache`)."""
    spec: ModelSpec
    """Architecture of the model in `config.model`."""
    format: WeightFormat
    """Format of the weights in the engines."""
    costs: CostModel
    """Costs of samples, by which they are spread over ranks and micro batches."""
    placement: Placement
    nodes: tuple[NodeResources, ...]
    """Nodes that the run may use."""
    memory: MemoryPlan
    warnings: tuple[str, ...]
    """Sentences for the user about a run that is not refused."""


def check_run(
    config: RunConfig, nodes: Sequence[NodeResources], found: Sequence[str] = (), *, in_container: bool = False
) -> CheckedRun:
    """The facts of a run that can be started on `nodes`; raises a `ConfigError` with every problem otherwise.

    Args:
        config: of the run.
        nodes: those that it may use.
        found: problems that the caller knows: of the environment from which the run starts.
        in_container: whether a container, whose packages are unknown here, replaces this Python. A run of which this
            process is a part has this Python.
    """
    problems = [*found, *run_combinations(config), *folder_problems("run_dir", config.run_dir)]
    problems += _gpu_problems(nodes) + deadline_problems(config.trainer, nodes[0])
    argument_problems, argument_warnings = run_arguments(config)
    problems += argument_problems
    num_prompts, found_in_files = training_files(config.data, groups_per_step=config.algorithm.max_groups)
    problems += found_in_files + _set_files(config.evaluation.sets, "evaluation.sets")
    if warm_start := config.history.warm_start:
        problems += path_problems("history.warm_start", warm_start) or warm_start_problems(Path(warm_start))
    spec = _model(config.model, problems)
    if spec is None:
        raise ConfigError(listing("configuration", problems))
    flash_attention = None if in_container else installed_flash_attention()
    problems += stop_token_problems("sampling.stop_token_ids", config.sampling.stop_token_ids, spec)
    fitted = fit(config, spec, nodes, problems, flash_attention=flash_attention, num_prompts=num_prompts)
    if fitted is not None:
        problems += allocator_problems(fitted.placement.transport, os.environ)
    _raise_any(problems)
    assert fitted is not None, "a run without a placement has problems"
    given, config = config, fitted.config
    format = WeightFormat.of(config.engine)
    warnings = weight_format_warnings(spec, format, nodes[0]) + fp8_warnings(spec, config.trainer, format)
    warnings += attention_warnings(config.trainer, nodes[0], flash_attention=flash_attention)
    warnings += algorithm_warnings(config.algorithm)
    warnings += checkpoint_warnings(config) + deadline_warnings(config)
    warnings += store_warnings(config, fitted.placement) + argument_warnings
    return CheckedRun(
        given=given,
        config=config,
        spec=spec,
        format=format,
        costs=cost_model(spec, config.trainer),
        placement=fitted.placement,
        nodes=tuple(nodes),
        memory=fitted.memory,
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSft:
    """A warm start that can be started, with the facts that its checks have read."""

    config: SftConfig
    spec: ModelSpec
    """Architecture of the model in `config.model`."""
    ranks: tuple[TrainerRank, ...]
    nodes: tuple[NodeResources, ...]
    """Nodes that the warm start may use."""
    memory: MemoryPlan
    warnings: tuple[str, ...]
    """Sentences for the user about a warm start that is not refused."""


def check_sft(config: SftConfig, nodes: Sequence[NodeResources], found: Sequence[str] = ()) -> CheckedSft:
    """The facts of a warm start that can be started on `nodes`; raises a `ConfigError` with every problem otherwise.

    `found` as in `check_run`.
    """
    node = nodes[0]
    problems = [*found, *_gpu_problems(nodes), *sft_file("data.path", config.data.path)]
    spec = _model(config.model, problems)
    if spec is None:
        raise ConfigError(listing("configuration", problems))
    problems += sft_problems(config, spec, node)
    kept = {"data.path": config.data.path, "log_path": config.log_path}
    problems += warm_start_target(config.output_dir, config.model, kept) + file_problems("log_path", config.log_path)
    problems += schedule_problems(config.trainer.optimizer, "trainer.optimizer")
    problems += deadline_problems(config.trainer, node)
    flash_attention = installed_flash_attention()
    memory = sft_memory(config, spec, node, flash_attention=flash_attention)
    problems += memory.problems()
    _raise_any(problems)
    ranks = plan_sft(config.trainer, nodes)
    warnings = attention_warnings(config.trainer, node, flash_attention=flash_attention)
    return CheckedSft(
        config=config, spec=spec, ranks=ranks, nodes=tuple(nodes), memory=memory, warnings=tuple(warnings)
    )


def _gpu_problems(nodes: Sequence[NodeResources]) -> list[str]:
    return [f"{node.name or 'this machine'}: {node.gpu_problem}" for node in nodes if node.gpu_problem]


def check_model(path: str) -> ModelSpec:
    """The architecture in a model's directory; raises `ConfigError` with every problem of its files."""
    problems: list[str] = []
    spec = _model(path, problems)
    _raise_any(problems)
    assert spec is not None, "a model without a specification has problems"
    return spec


def check_eval(config: EvalConfig, found: Sequence[str] = ()) -> None:
    """Raises `ConfigError` for an evaluation that cannot be started; `found` as in `check_run`."""
    problems = [*found, *evaluation_sets(config.sets, "sets"), *_set_files(config.sets, "sets")]
    problems += file_problems("output", config.output)
    problems += function_problems({"reward.function": config.reward.function})
    problems += engine_arguments(config.engine)[0]  # where vLLM cannot be imported, the engines will say so
    if not config.sets:
        problems.append("`sets` is empty; name at least one evaluation set")
    if config.engine.format != "bf16":
        problems.append(
            f"`engine.format` = {config.engine.format}: `eval` loads the directory with vLLM, in bf16; remove the key"
        )
    if config.engine.kv_format != "bf16":
        problems.append(
            f"`engine.kv_format` = {config.engine.kv_format}: a publish sets its scales, and `eval` has none; remove "
            "the key"
        )
    if config.engine.gpu_memory_fraction is not None:
        problems.append(
            f"`engine.gpu_memory_fraction` = {config.engine.gpu_memory_fraction:g}: `eval` has no memory plan; set "
            "`engine.kv_cache_bytes` instead"
        )
    spec = _model(config.model, problems)
    if spec is not None:
        responses = response_lengths(config.sets, "sets")
        problems += engine_problems(spec, config.engine, config.max_prompt_tokens, responses)
        problems += stop_token_problems("stop_token_ids", config.stop_token_ids, spec)
        problems += forward_problems(config.engine, config.max_prompt_tokens + max(responses.values(), default=0))
    _raise_any(problems)


def _raise_any(problems: list[str]) -> None:
    if problems:
        raise ConfigError(listing("configuration", problems))


def _model(path: str, problems: list[str]) -> ModelSpec | None:
    """The architecture in the directory `path`; None if it cannot be read. Reasons are added to `problems`."""
    if found := path_problems("model", path):
        problems += found
        return None
    directory = Path(path)
    if not directory.is_dir():
        problems.append(f"`model` = {path}: no such directory; download or make the Hugging Face directory first")
        return None
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        problems.append(f"`model` = {path}: holds no tokenizer (one of {', '.join(TOKENIZER_FILES)})")
    try:
        spec = read_model_spec(directory)
    except ValueError as error:
        problems.append(f"`model` = {path}: {error}")
        return None
    problems += tokenizer_problems(directory / "tokenizer.json", spec.vocab_size) + broken_json(directory)
    problems += _weights(directory, spec)
    return spec


def _weights(directory: Path, spec: ModelSpec) -> list[str]:
    if not any(directory.glob("*.safetensors")):
        return [f"`model` = {directory}: holds no *.safetensors; convert the weights, other files are not read"]
    try:
        tensors = directory_tensors(directory)
        check_shapes(tensors, spec, directory)
        check_tied_output(tensors, spec, directory)
    except (ValueError, OSError) as error:
        return [f"`model`: {error}"]
    return []


def _set_files(sets: dict[str, EvalSetConfig], key: str) -> list[str]:
    return [
        problem
        for name, config in sets.items()
        for problem in prompt_file(f"{key}.{name}.path", config.path, limit=config.limit)
    ]
