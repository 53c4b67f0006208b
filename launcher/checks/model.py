"""Problems of a configuration with its model, judged from the model's `config.json` and the kind of node. Pure."""

import math
from collections.abc import Mapping, Sequence

from launcher.checks.formats import kv_format_problems, weight_format_problems
from launcher.checks.fp8 import fp8_problems
from launcher.cluster.node import NodeResources
from launcher.config.schema import RunConfig, SftConfig
from megatron_rl.activations import recomputation
from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.memory import kv_bytes_per_token
from megatron_rl.model.spec import ModelSpec, check_parallel, stage_layers
from rollout.config import EngineConfig, EvalSetConfig
from rollout.weights.format import WeightFormat


def model_problems(
    config: RunConfig, spec: ModelSpec, node: NodeResources, *, fraction: float | None = None
) -> list[str]:
    """Problems of a run with its model.

    Args:
        config: of the run.
        spec: architecture of the model.
        node: says which devices there are.
        fraction: the `engine.gpu_memory_fraction` that has sized the KV cache, if one has.
    """
    responses = {"sampling.max_response_tokens": config.sampling.max_response_tokens}
    responses |= response_lengths(config.evaluation.sets, "evaluation.sets")
    tensor_parallel = config.engine.tensor_parallel
    return [
        *partition_problems(spec, config.trainer.parallel, node),
        *engine_problems(spec, config.engine, config.data.max_prompt_tokens, responses, fraction=fraction),
        *weight_format_problems(spec, WeightFormat.of(config.engine), node, tensor_parallel=tensor_parallel),
        *kv_format_problems(spec, config.engine.kv_format, node),
        *fp8_problems(spec, config.trainer, node),
        *recompute_problems(spec, config.trainer),
        *_device_phases(config, node),
        *hosted_state_problems(config.trainer, node),
    ]


def sft_problems(config: SftConfig, spec: ModelSpec, node: NodeResources) -> list[str]:
    """Problems of a warm start with its model; `node` says which devices there are."""
    problems = []
    if config.batch_size % config.trainer.parallel.data:
        problems.append(
            f"`batch_size` = {config.batch_size} is not divisible by `trainer.parallel.data` = "
            f"{config.trainer.parallel.data}"
        )
    if config.data.max_tokens > spec.max_positions:
        problems.append(
            f"`data.max_tokens` = {config.data.max_tokens}, but the model has {spec.max_positions} positions; lower it"
        )
    return [
        *problems,
        *partition_problems(spec, config.trainer.parallel, node),
        *fp8_problems(spec, config.trainer, node),
        *recompute_problems(spec, config.trainer),
        *hosted_state_problems(config.trainer, node),
    ]


def partition_problems(spec: ModelSpec, parallel: ParallelConfig, node: NodeResources) -> list[str]:
    """Problems of a trainer's partition."""
    problems = []
    try:
        check_parallel(spec, parallel)
    except ValueError as error:
        problems.append(str(error))
    if parallel.tensor > 1 and parallel.expert > 1 and not node.gpu_bytes:
        problems.append(
            f"`trainer.parallel.expert` = {parallel.expert} with `trainer.parallel.tensor` = {parallel.tensor}: gloo "
            "cannot gather the tokens of distributed experts over tensor ranks; on a CPU set one of them to 1"
        )
    return problems


def engine_problems(
    spec: ModelSpec,
    engine: EngineConfig,
    max_prompt: int,
    responses: Mapping[str, int],
    *,
    fraction: float | None = None,
) -> list[str]:
    """Problems of an engine: heads that do not divide, sequences beyond the model's positions or its cache.

    `fraction` is the `engine.gpu_memory_fraction` that has sized the cache, if one has.
    """
    problems = []
    cache = f"`engine.kv_cache_bytes` = {engine.kv_cache_bytes}"
    if fraction is not None:
        cache = f"`engine.gpu_memory_fraction` = {fraction:g} leaves {engine.kv_cache_bytes}"
    for heads, count in {"attention heads": spec.num_heads, "key/value heads": spec.num_kv_heads}.items():
        if count % engine.tensor_parallel:
            problems.append(
                f"`engine.tensor_parallel` = {engine.tensor_parallel} does not divide the model's {count} {heads}; "
                f"{math.gcd(spec.num_heads, spec.num_kv_heads)} and its divisors do"
            )
    for key, response in responses.items():
        sequence = f"max_prompt_tokens {max_prompt} + `{key}` {response} = {max_prompt + response} tokens"
        if max_prompt + response > spec.max_positions:
            problems.append(f"{sequence}, but the model has {spec.max_positions} positions; lower one of them")
        needed = (max_prompt + response) * kv_bytes_per_token(spec, engine.tensor_parallel, engine.kv_format)
        if engine.gpu_memory_fraction is None and needed > engine.kv_cache_bytes:
            fix = "lower one of them" if fraction == 1 else "raise it"
            problems.append(f"{sequence} need {needed} bytes of keys and values, but {cache}; {fix}")
    return problems


def response_lengths(sets: Mapping[str, EvalSetConfig], key: str) -> dict[str, int]:
    """Longest response by the key that bounds it."""
    return {f"{key}.{name}.max_response_tokens": config.max_response_tokens for name, config in sets.items()}


def recompute_problems(spec: ModelSpec, trainer: TrainerConfig, *, beside: Sequence[ModelSpec] = ()) -> list[str]:
    """Problems of `recompute_num_layers` of `trainer.megatron`, with which Megatron's first forward would fail.

    The fix that they name also suits the models `beside`, which have the same keys.
    """
    if trainer.recompute == "selective" and "recompute_num_layers" in trainer.megatron:
        return [
            f"`trainer.megatron` sets recompute_num_layers = {trainer.megatron['recompute_num_layers']}, and "
            "`trainer.recompute` = selective recomputes no layers; set recompute to full, or remove the field"
        ]
    method, size = recomputation(trainer)
    stages, *others = (
        {len(stage) for stage in stage_layers(each.num_layers, trainer.parallel.pipeline)} for each in (spec, *beside)
    )
    if trainer.recompute != "full" or method != "uniform" or not any(layers % size for layers in stages):
        return []
    return [
        f"`trainer.megatron` sets recompute_num_layers = {size}, which does not divide the "
        f"{' and '.join(map(str, sorted(stages)))} layers of the pipeline stages; {math.gcd(*stages.union(*others))} "
        "and its divisors do, and any number with recompute_method = block"
    ]


def hosted_state_problems(trainer: TrainerConfig, node: NodeResources) -> list[str]:
    """Problems of optimizer states that are to stay in host memory."""
    hosted = (("optimizer", trainer.optimizer), ("critic.optimizer", trainer.critic.optimizer))
    if not node.gpu_bytes:
        reason = "a trainer on a CPU has all its memory there; set it to false"
        return [f"`trainer.{key}.states_on_host` = true: {reason}" for key, each in hosted if each.states_on_host]
    return [
        f"`trainer.{key}.states_on_host` = true with `trainer.{key}.distributed` = false: a resumed run would read the "
        "states of gated layers into a second copy on the GPU; set both to true, also without replicas"
        for key, each in hosted
        if each.states_on_host and not each.distributed
    ]


def _device_phases(config: RunConfig, node: NodeResources) -> list[str]:
    """Problems of keys that free memory of devices."""
    problems = []
    if config.engine.sleep_level and not node.gpu_bytes:
        problems.append(f"`engine.sleep_level` = {config.engine.sleep_level}: only engines on GPUs sleep; set it to 0")
    if config.trainer.offload != "none" and not node.gpu_bytes:
        problems.append(
            f"`trainer.offload` = {config.trainer.offload}: a trainer on a CPU cannot be offloaded; set it to none"
        )
    if config.engine.sleep_level and config.publish.delta:
        problems.append(
            f"`engine.sleep_level` = {config.engine.sleep_level} with `publish.delta` = true: an engine needs all "
            "weights after sleeping, and its delta baseline fills the memory that sleeping frees; turn one of them off"
        )
    return problems
