"""Where vLLM 0.25/0.26 and 0.32 differ, and the few internals of `AsyncLLM` that are read.

Everything else in this package uses vLLM's public interface as it is in all of these versions.
"""

import asyncio

from vllm.v1.engine.async_llm import AsyncLLM


async def drain(llm: AsyncLLM) -> None:
    """Wait until every output that the engine core has sent was handed to its request.

    After `pause_generation` the core sends no more. Its outputs lie in `outputs_queue` before the pause returns, and
    the handler processes what it takes without yielding (one chunk: see `ProcessEnv`), so an empty queue means done.
    """
    queue = llm.engine_core.outputs_queue
    while not queue.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def num_emitted_tokens(llm: AsyncLLM, request_id: str) -> int | None:
    """Tokens that a request has emitted so far; None once it has finished (or before it was taken)."""
    state = llm.output_processor.request_states.get(request_id)
    return None if state is None else int(state.detokenizer.num_output_tokens())


async def note_weight_version(llm: AsyncLLM, weight_version: int) -> None:
    """Tell vLLM >= 0.32 the version of the weights that it holds, so that it reports spans of its own."""
    if hasattr(llm, "update_weight_version"):
        await llm.update_weight_version(str(weight_version))
