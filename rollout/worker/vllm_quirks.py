"""Workarounds for faults of vLLM, one function each, named after the symptom.

Every function checks the kernel or symbol in use, not a version. Where upstream has fixed the fault, or another kernel
is in use, the function does nothing. Each function has a test that fails once the fault is gone, so that the function
can be removed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_input_batch import InputBatch

from rollout.cpu import quirks

_POLL_S = 0.5
"""Interval in seconds at which a waiting caller checks that the engine is alive."""


class CoreClient(Protocol):
    """The parts of AsyncLLM's connection to the sampling process that this file uses."""

    resources: BackgroundResources
    call_utility_async: Callable[..., Awaitable[object]]


def calls_wait_forever_for_a_dead_engine(client: CoreClient) -> None:
    """Make pending calls raise `EngineDeadError` when the sampling process dies, as later calls do.

    vLLM notices the death and fails requests, but never answers pending calls: an update would wait for its deadline.
    """
    call = client.call_utility_async

    async def call_while_it_lives(method: str, *args: object) -> object:
        answer = asyncio.ensure_future(call(method, *args))
        try:
            while not (await asyncio.wait({answer}, timeout=_POLL_S))[0]:
                if client.resources.engine_dead:
                    raise EngineDeadError
            return answer.result()
        finally:
            answer.cancel()

    client.call_utility_async = call_while_it_lives


class ModelRunner(Protocol):
    """The parts of vLLM's model runner (V1) that this file uses."""

    input_batch: InputBatch
    discard_request_mask: CpuGpuBuffer
    """Rows of the batch whose sampled token is discarded."""
    max_model_len: int
    num_spec_tokens: int
    effective_drafter_max_model_len: int
    """Bound for a row's text with a full draft; once one row exceeds it, vLLM drafts for no row."""


@contextmanager
def seeded_request_dies_in_partial_prefill(runner: ModelRunner) -> Iterator[None]:
    """Let rows whose sampled token is discarded sample without their own generator.

    A prompt that is prefilled in several chunks samples a token after each chunk. For all chunks but the last, vLLM
    rewinds the request's generator by its CUDA offset. A CPU generator has no such offset, and `rollout.worker.sampler`
    reads only the seed of a generator, so its offset never changes. Without the generator vLLM rewinds nothing.
    """
    generators = runner.input_batch.generators
    discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    removed = {int(row): generators.pop(int(row)) for row in discarded if int(row) in generators}
    try:
        yield
    finally:
        generators.update(removed)


def one_request_near_its_end_takes_the_drafts_of_all(runner: ModelRunner) -> None:
    """Raise the bound beyond which vLLM drafts zeros for the whole batch; the proposer bounds each row separately."""
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens + 1


def graphs_of_experts_read_freed_strides_after_reload(model: nn.Module) -> None:
    """Let the kernels of experts outlive reloads.

    vLLM 0.25 builds a kernel object for the experts of a layer whenever it repacks their weights. Cutlass's object for
    FP8 owns tensors with strides, and captured CUDA graphs read those of the first one, which a reload frees: an
    illegal memory access in the next forward. The first object refers to the layer's own scales, into which a reload
    copies the new ones, so it stays right.

    Its strides lie in the memory of the weights, but are neither parameters nor buffers of a layer. So an engine that
    sleeps at level 2 discards them. Each reload copies the new object's tensors into those of the first one.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase) and method.moe_kernel is not None:
            _keep_kernel(method)


def _keep_kernel(method: FusedMoEMethodBase) -> None:
    process = method.process_weights_after_loading
    if getattr(process, "keeps_kernel", False):
        return
    kept = method.moe_kernel, method.moe_quant_config

    def process_with_kept_kernel(layer: nn.Module) -> None:
        process(layer)
        # at once, because the sums of a publish are taken through the kernel while other layers still load
        _refill(kept[0], method.moe_kernel)
        method.moe_kernel, method.moe_quant_config = kept

    process_with_kept_kernel.keeps_kernel = True  # type: ignore[attr-defined]
    method.process_weights_after_loading = process_with_kept_kernel


def _refill(kept: object, fresh: object) -> None:
    """Copy the tensors of an object into an older one of the same class, in place, attribute by attribute at any depth.

    Tensors that differ in shape or dtype stay as they are: forwards have made them, not loads.
    """
    pairs, seen = [(kept, fresh)], set[int]()
    while pairs:
        old, new = pairs.pop()
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if old.shape == new.shape and old.dtype == new.dtype:
                old.copy_(new)
        elif old is not new and type(old) is type(new) and id(old) not in seen and not isinstance(old, nn.Module):
            seen.add(id(old))
            others = getattr(new, "__dict__", {})
            pairs += [(value, others[name]) for name, value in getattr(old, "__dict__", {}).items() if name in others]


class _NotAboutRotaryEmbeddings(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "RotaryEmbedding" not in record.getMessage()


def reload_complains_about_rotary_embeddings() -> None:
    """Drop the warning that a rotary embedding "failed to load weights": its only table is computed, not loaded."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    if not any(isinstance(filter, _NotAboutRotaryEmbeddings) for filter in logger.filters):
        logger.addFilter(_NotAboutRotaryEmbeddings())


def before_reload(model: nn.Module) -> None:
    """Apply the workarounds that are needed before a model goes back to checkpoint layout."""
    quirks.embedding_is_held_twice(model)
    quirks.output_layer_is_packed_beside_its_old_copy(model)
    quirks.experts_multiply_by_unpacked_weights_after_reload(model)
    if current_platform.is_cuda():
        graphs_of_experts_read_freed_strides_after_reload(model)


def after_reload(model: nn.Module) -> None:
    """Apply the workarounds that are needed after the last layer was repacked."""
    quirks.tied_head_multiplies_by_old_embedding_after_reload(model)
