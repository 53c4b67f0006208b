"""Problems of a configuration with its model, judged from the model's `config.json` and the kind of node. Pure."""

import math
from collections.abc import Mapping, Sequence

from launcher.checks.formats import kv_format_problems, weight_format_problems
from launcher.checks.fp8 import fp8_problems
from launcher.cluster.node import NodeResources
from launcher.config.schema import RunConfig, SftConfig
from megatron_rl.activations import recomputation
from megatron_rl.config import CriticConfig, ParallelConfig, ReferenceConfig, TrainerConfig
from megatron_rl.memory import kv_bytes_per_token
from megatron_rl.model.spec import ModelSpec, check_parallel, stage_layers
from megatron_rl.passthrough import recompute_problem
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
    longest = config.data.max_prompt_tokens + max(responses.values())
    draft_tokens = config.history.max_draft_tokens if config.drafts else 0
    tensor_parallel = config.engine.tensor_parallel
    return [
        *partition_problems(spec, config.trainer.parallel, node),
        *engine_problems(spec, config.engine, config.data.max_prompt_tokens, responses, fraction=fraction),
        *forward_problems(config.engine, longest, draft_tokens=draft_tokens, on_gpu=bool(node.gpu_bytes)),
        *_probe(config, longest, node),
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
        *_unused(config.trainer),
        *partition_problems(spec, config.trainer.parallel, node),
        *fp8_problems(spec, config.trainer, node),
        *recompute_problems(spec, config.trainer),
        *hosted_state_problems(config.trainer, node),
    ]


def _unused(trainer: TrainerConfig) -> list[str]:
    """Keys that a warm start has no use for: it has neither engines nor a model beside the trained one."""
    problems = []
    if trainer.offload != "none":
        problems.append(
            f"`trainer.offload` = {trainer.offload}: a warm start has no engines for which its trainer would make "
            "room; set it to none"
        )
    if trainer.critic != CriticConfig():
        problems.append("`trainer.critic` is set, but a warm start trains no critic; leave it out")
    if trainer.reference != ReferenceConfig():
        problems.append("`trainer.reference` is set, but a warm start reads no reference policy; leave it out")
    return problems


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


def stop_token_problems(key: str, ids: Sequence[int], spec: ModelSpec) -> list[str]:
    """Problems of stop tokens at the configuration key `key` that no response can hold."""
    wrong = [str(token) for token in ids if not 0 <= token < spec.vocab_size]
    if not wrong:
        return []
    return [
        f"`{key}` names {', '.join(wrong[:3])}{', ...' if wrong[3:] else ''}: the ids of the model's tokens go from 0 "
        f"to {spec.vocab_size - 1}; remove it, or name the model's own"
    ]


def forward_problems(engine: EngineConfig, longest: int, *, draft_tokens: int = 0, on_gpu: bool = False) -> list[str]:
    """Sizes of a forward that vLLM refuses when engines start.

    Args:
        engine: configuration of the engines.
        longest: tokens of the longest prompt with the longest response.
        draft_tokens: most drafted tokens of a request; 0 without drafts.
        on_gpu: whether engines have GPUs. Those on a CPU have vLLM's own size where none is given.
    """
    given = "max_num_batched_tokens" in engine.vllm
    most, full, problems = engine.forward_tokens(draft_tokens), 1 + draft_tokens, []
    key = f"`engine.vllm.max_num_batched_tokens` = {most}"
    if most < engine.max_num_seqs:
        problems.append(
            f"{key} with `engine.max_num_seqs` = {engine.max_num_seqs}: a forward holds a token of every request; "
            f"raise it to {engine.max_num_seqs} or more, or lower max_num_seqs"
        )
    if engine.vllm.get("enable_chunked_prefill") is False and most < longest and (given or on_gpu):
        problems.append(
            f"`engine.vllm.enable_chunked_prefill` = false: a forward must hold the longest sequence, of {longest} "
            f"tokens, and holds {most}; set `engine.vllm.max_num_batched_tokens` to {longest} or more"
        )
    if on_gpu and draft_tokens and not engine.vllm.get("enforce_eager") and not engine.graph_tokens(draft_tokens):
        problems.append(
            f"{key} with `history.max_draft_tokens` = {draft_tokens}: vLLM's smallest CUDA graph with drafts has the "
            f"{full} tokens of a request with a full draft; raise it to {full}, lower max_draft_tokens, or set "
            "`engine.vllm.enforce_eager` to true"
        )
    return problems


def _probe(config: RunConfig, longest: int, node: NodeResources) -> list[str]:
    """Problems of the probe's length with engines, which score it in one forward and sample a token after it."""
    probe, problems = config.publish.probe_tokens, []
    all_draft = config.drafts and not config.history.baseline_engines
    # without a size of its own, an engine on a CPU has vLLM's, with or without drafts
    most = config.engine.forward_tokens(config.history.max_draft_tokens if all_draft and node.gpu_bytes else 0)
    if probe > most:
        problems.append(
            f"`publish.probe_tokens` = {probe}: an engine scores the probe in one forward, which holds {most} tokens; "
            f"lower it to {most} or less, or raise `engine.vllm.max_num_batched_tokens`"
        )
    if probe >= longest:
        problems.append(
            f"`publish.probe_tokens` = {probe}: an engine samples a token after the probe, and its longest sequence "
            f"(`data.max_prompt_tokens` and the longest response) has {longest} tokens; lower it below {longest}"
        )
    return problems


def response_lengths(sets: Mapping[str, EvalSetConfig], key: str) -> dict[str, int]:
    """Longest response by the key that bounds it."""
    return {f"{key}.{name}.max_response_tokens": config.max_response_tokens for name, config in sets.items()}


def recompute_problems(spec: ModelSpec, trainer: TrainerConfig, *, beside: Sequence[ModelSpec] = ()) -> list[str]:
    """Problems of the recomputation in `trainer.megatron`, with which Megatron's first forward would fail.

    The fix that they name also suits the models `beside`, which have the same keys.
    """
    if problem := recompute_problem(trainer.recompute, trainer.megatron):
        return [problem]
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
