"""Differences between vLLM 0.25/0.26 and 0.32, and the few internals of `AsyncLLM` that are read.

The rest of this package uses only vLLM's public interface that all of these versions share.
"""

import asyncio

import numpy as np
import torch
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollout.types import Flags, Logprobs, TokenIds

DEAD = EngineDeadError
"""Raised by calls and requests when the sampling process has ended."""

RESAMPLED = -1
"""Rank of a token that was emitted because its draft was rejected. All other tokens have 0, and vLLM's own sampler
gives ranks above 0."""


async def drain(llm: AsyncLLM) -> None:
    """Wait until every output that the engine core has sent has reached its request.

    After `pause_generation` the core sends nothing more. All its outputs are in `outputs_queue` before the pause
    returns. The handler processes each output without yielding (one chunk: see `ProcessEnv`), so an empty queue means
    that all are processed.
    """
    queue = llm.engine_core.outputs_queue
    while not queue.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def num_emitted_tokens(llm: AsyncLLM, request_id: str) -> int | None:
    """Tokens that a request has emitted so far; None once it has finished, or before vLLM knows it."""
    state = llm.output_processor.request_states.get(request_id)
    return None if state is None else int(state.detokenizer.num_output_tokens())


def emitted(llm: AsyncLLM, request_id: str) -> tuple[TokenIds, Logprobs, Flags]:
    """Tokens that a request has emitted so far, their log-probabilities, and whether they stand at rejected drafts.

    Works after the engine has died.
    """
    state = llm.output_processor.request_states.get(request_id)
    if state is None or state.logprobs_processor is None or state.logprobs_processor.logprobs is None:
        return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.bool_)
    ids = np.array(state.detokenizer.output_token_ids, dtype=np.int32)
    logprobs = np.array(state.logprobs_processor.logprobs.logprobs, dtype=np.float32)
    resampled = np.array(state.logprobs_processor.logprobs.ranks, dtype=np.int64) == RESAMPLED
    count = min(len(ids), len(logprobs), len(resampled))  # vLLM updates one list before the other
    return ids[:count], logprobs[:count], resampled[:count]


def num_context_tokens(llm: AsyncLLM, request_id: str) -> int:
    """Tokens of a request that have keys and values: prompt and emitted tokens; 0 before the first emitted token."""
    emitted = num_emitted_tokens(llm, request_id)
    return int(llm.output_processor.request_states[request_id].prompt_len) + emitted if emitted else 0


def first_blocks(cache: torch.Tensor, num_blocks: int, count: int) -> torch.Tensor:
    """A view of the first `count` blocks of a layer's key-value cache.

    Since vLLM 0.32 blocks are the first dimension; before, keys and values may be the first. A kernel's blocks may be
    smaller than the scheduler's.
    """
    dim = next(dim for dim in (0, 1) if cache.shape[dim] >= num_blocks and cache.shape[dim] % num_blocks == 0)
    return cache.narrow(dim, 0, count * (cache.shape[dim] // num_blocks))


async def note_weight_version(llm: AsyncLLM, weight_version: int) -> None:
    """Tell vLLM >= 0.32 the version of its weights, so that it reports version spans itself."""
    if hasattr(llm, "update_weight_version"):
        await llm.update_weight_version(str(weight_version))
