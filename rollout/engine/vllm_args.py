"""Builds vLLM's arguments from the configuration of an engine.

An engine starts from a directory's `config.json` alone: weights are dummies until publish 0, and the quantised layout
comes from overrides of that configuration, not from a checkpoint. Only an engine that evaluates a directory reads
weights from it.

Invariant: `engine_arguments` refuses a user's key that vLLM does not know, and a key that this program sets itself; the
message names the alternative.
"""

import dataclasses
import difflib
import os
from collections.abc import Sequence
from typing import TypedDict

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from history.patience import NEVER
from rollout.config import EngineConfig, Format
from rollout.engine.spec import DraftSpec, EngineSpec
from rollout.weights.format import FP8_BLOCK
from rollout.worker.receiver import BACKEND

WORKER = "rollout.worker.worker.Worker"
PROPOSER = "rollout.worker.proposer.HistoryProposer"

_FREE_AT_START = 0.01
"""Share of a device that vLLM wants to find free before it starts.

The bytes of keys and values are set, so vLLM uses the share for nothing else. Its default of 0.92 refuses a start
beside a trainer, beside another engine, and after a death in the middle of a run. The memory plan judges whether all
fits."""

_FP8_GPU = 89
"""Least compute capability of GPUs with FP8 matrix products, times ten."""

OWNED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "skip_tokenizer_init": "nothing: engines see token ids only",
    "load_format": "nothing: the first publish brings the weights",
    "quantization": "engine.format",
    "hf_overrides": "engine.format",
    "dtype": "engine.format",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": "nothing: engines have no pipeline",
    "data_parallel_size": "engine.num_engines",
    "enable_expert_parallel": "engine.tensor_parallel: a publish cuts every expert, and sums prove the cuts",
    "enable_eplb": "engine.tensor_parallel: a publish cuts every expert, and sums prove the cuts",
    "async_scheduling": "publish.in_flight: with kept responses, a probe between two forwards rules it out",
    "max_num_seqs": "engine.max_num_seqs",
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
    "gpu_memory_utilization": "engine.kv_cache_bytes",
    "kv_cache_dtype": "engine.kv_format",
    "kv_cache_dtype_skip_layers": "engine.kv_format",
    "calculate_kv_scales": "engine.kv_format",
    "max_model_len": "data.max_prompt_tokens and sampling.max_response_tokens",
    "logprobs_mode": "nothing: rollout log-probabilities are processed ones",
    "enable_sleep_mode": "engine.sleep_level",
    "worker_cls": "nothing: the worker receives the weights",
    "weight_transfer_config": "publish.transport",
    "additional_config": "nothing: it carries this program's settings to the worker",
    "speculative_config": "history.drafts",
    "seed": "seed",
    "generation_config": "sampling",
}
"""Arguments of vLLM that this program sets, and the configuration field to use instead."""


class QuantizationGroup(TypedDict):
    """One group of a compressed-tensors configuration."""

    targets: list[str]
    weights: dict[str, str | int | bool]
    input_activations: dict[str, str | int | bool]


class ChannelConfig(TypedDict):
    """The part of `config.json` that describes a compressed-tensors checkpoint."""

    quant_method: str
    format: str
    quantization_status: str
    ignore: list[str]
    config_groups: dict[str, QuantizationGroup]


class BlockConfig(TypedDict):
    """The part of `config.json` that describes a checkpoint with FP8 blocks."""

    quant_method: str
    activation_scheme: str
    weight_block_size: list[int]
    modules_to_not_convert: list[str]


def quantization_config(format: Format, bf16_modules: Sequence[str] = ()) -> ChannelConfig | BlockConfig | None:
    """Return the quantisation part of `config.json` for a checkpoint in `format`; None for BF16.

    Args:
        format: of the checkpoint.
        bf16_modules: names of linear layers of decoder layers that stay BF16.
    """
    if format == "bf16":
        return None
    if format == "fp8_block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": ["lm_head", *bf16_modules],
        }
    kind, name = ("int", "int-quantized") if format == "int8" else ("float", "float-quantized")
    number: dict[str, str | int | bool] = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": ["lm_head", *bf16_modules],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": number | {"strategy": "channel", "dynamic": False},
                "input_activations": number | {"strategy": "token", "dynamic": True},
            }
        },
    }


def check_device(format: Format) -> None:
    """Refuse a format for which this machine's GPUs have no matrix products.

    Raises:
        ValueError: FP8 on a GPU without FP8 matrix products; the message suggests INT8.
    """
    if format.startswith("fp8") and current_platform.is_cuda() and not current_platform.has_device_capability(_FP8_GPU):
        capability = current_platform.get_device_capability()
        raise ValueError(
            f"engine.format {format}: {current_platform.get_device_name()} (compute capability "
            f"{capability and capability.as_version_str()}) has no FP8 matrix products, which need 8.9; use int8"
        )


def check_kv_format(spec: EngineSpec) -> None:
    """Refuse FP8 keys and values in an engine that cannot have the right scales.

    Raises:
        ValueError: the engine takes no publishes, or keeps keys and values over a publish.
    """
    if spec.config.kv_format == "bf16":
        return
    if spec.load_from_directory:
        raise ValueError("engine.kv_format fp8: a publish sets the scales, and an engine of a directory has none")
    if spec.in_flight == "keep_kv":
        raise ValueError("engine.kv_format fp8: a publish sets other scales, so publish.in_flight cannot be keep_kv")


def speculation(drafts: DraftSpec) -> dict[str, str | int]:
    """Settings with which vLLM asks `HistoryProposer` for drafts and verifies them exactly."""
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": drafts.max_draft_tokens}


def graph_sizes(config: EngineConfig, draft_tokens: int) -> list[int]:
    """Numbers of tokens for which CUDA graphs are captured in an engine with drafts of up to `draft_tokens` tokens.

    All are multiples of a request's tokens with a full draft. When vLLM sizes the KV cache, it rounds other sizes up to
    such multiples and drops those above the largest size. So a forward of few tokens is padded to one multiple.

    Steps are 8 tokens up to 256 tokens, as vLLM's own, and 64 above, both rounded up to a multiple. vLLM's sizes end at
    512, which 256 requests with drafts exceed, so those forwards would launch every kernel by itself.

    Raises:
        ValueError: a forward does not hold one request with a full draft, for which vLLM must capture a graph.
    """
    multiple, largest = 1 + draft_tokens, config.graph_tokens(draft_tokens)
    if not largest:
        raise ValueError(
            f"engine.vllm.max_num_batched_tokens {config.forward_tokens(draft_tokens)}: vLLM's smallest CUDA graph "
            f"with drafts has {multiple} tokens, a request's with a full draft. Raise it to {multiple}, lower "
            f"history.max_draft_tokens {draft_tokens}, or set engine.vllm.enforce_eager"
        )
    near, far = (-(-step // multiple) * multiple for step in (8, 64))
    middle = -(-256 // near) * near
    sizes = [*range(multiple, near, multiple), *range(near, middle, near), *range(middle, largest, far)]
    return [*(size for size in sizes if size < largest), largest]


def check_passthrough(table: dict[str, str | int | float | bool]) -> None:
    """Refuse keys of the `vllm` table that vLLM does not know or that this program sets.

    Raises:
        ValueError: names the key and the alternative.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for key in table:
        if key in OWNED:
            raise ValueError(f"engine.vllm.{key} is set by this program; use {OWNED[key]}")
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"engine.vllm.{key} is no argument of vLLM's engine{hint}")


def engine_arguments(spec: EngineSpec, bf16_modules: Sequence[str] = ()) -> AsyncEngineArgs:
    """Build vLLM's arguments for one engine; `bf16_modules` are linear layers that stay BF16 in an 8-bit format.

    Raises:
        ValueError: a key of the `vllm` table is unknown or set by this program, or the device lacks the format, or
            `check_kv_format` or `graph_sizes` refuses the engine.
    """
    config = spec.config
    check_passthrough(config.vllm)
    check_device(config.format)
    check_kv_format(spec)
    quantization = None if spec.load_from_directory else quantization_config(config.format, bf16_modules)
    arguments = AsyncEngineArgs(
        model=spec.directory,
        skip_tokenizer_init=True,
        load_format="auto" if spec.load_from_directory else "dummy",
        hf_overrides={} if quantization is None else {"quantization_config": quantization},
        dtype="bfloat16",
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend="mp" if config.tensor_parallel > 1 else None,
        max_num_seqs=config.max_num_seqs,
        max_model_len=spec.max_model_len,
        kv_cache_memory_bytes=config.kv_cache_bytes,
        kv_cache_dtype="fp8" if config.kv_format == "fp8" else "auto",
        enable_sleep_mode=config.sleep_level > 0,
        enforce_eager=bool(current_platform.is_cpu()),
        # a probe runs between two forwards of responses in flight, and with asynchronous scheduling vLLM would read
        # their next tokens from a buffer that the probe has overwritten
        async_scheduling=False if spec.in_flight == "keep_kv" else None,
        logprobs_mode="processed_logprobs",
        worker_cls=WORKER,
        weight_transfer_config={"backend": BACKEND},
        speculative_config=None if spec.drafts is None else speculation(spec.drafts),
        additional_config={"owner_pid": os.getpid(), "drafts": spec.drafts and dataclasses.asdict(spec.drafts)},
        generation_config="vllm",
        seed=0,
        disable_log_stats=True,
        enable_log_requests=False,
    )
    if current_platform.is_cuda():
        arguments.gpu_memory_utilization = _FREE_AT_START
        most = config.forward_tokens(0 if spec.drafts is None else spec.drafts.max_draft_tokens)
        arguments.max_num_batched_tokens = most
        if spec.drafts is not None and not config.vllm.get("enforce_eager"):
            arguments.cudagraph_capture_sizes = graph_sizes(config, spec.drafts.max_draft_tokens)
    if config.tensor_parallel > 1:  # torch's clock goes on while a job is suspended (decision 62)
        for limit in ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"):
            if hasattr(arguments, limit):  # some versions of vLLM lack the second
                setattr(arguments, limit, int(NEVER.total_seconds()))
    for key, value in config.vllm.items():
        setattr(arguments, key, value)
    return arguments
