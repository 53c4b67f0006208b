"""An engine that always drafts, and the greedy tokens of its model without drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from history.index.segment import build_segment, write_segment
from history.types import PastResponse, prompt_key
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.spec import DraftSpec, EngineSpec
from rollout.engine.vllm_args import engine_arguments
from tests.rollout.conftest import engine_environment
from tests.support.engines.live import Live
from tests.support.engines.packing import RUN_ID

PROMPT = (5, 9, 17, 33)
KEY = prompt_key("test/0")
"""Of every group of `Live`."""
LENGTH = 200


@contextmanager
def drafting_engine(
    checkpoints, loop, directory: Path, segments: Path, *, tensor_parallel: int = 1, kv_cache_bytes: int = 64 << 20
) -> Iterator[Live]:
    """A float32 engine that serves weights A; in float32, greedy tokens do not depend on the batch."""
    config = EngineConfig(
        tensor_parallel=tensor_parallel,
        kv_cache_bytes=kv_cache_bytes,
        max_num_seqs=16,
        update_timeout_s=30,
        vllm={"max_num_batched_tokens": 64},
    )
    spec = EngineSpec(
        engine_id=4,
        run_id=RUN_ID,
        config=config,
        directory=str(directory),
        max_model_len=256,
        drafts=DraftSpec(max_draft_tokens=8, segments_dir=str(segments)),
    )
    started = Live(Engine(spec), loop, checkpoints, "bf16")
    with pytest.MonkeyPatch.context() as patch, engine_environment():
        patch.setattr("rollout.engine.vllm_args.PROPOSER", "tests.support.engines.eager_proposer.EagerProposer")
        patch.setattr("rollout.engine.engine.engine_arguments", in_float32)
        loop.run(started.engine.start())
        loop.run(started.use_shm())
        loop.run(started.push("A"))
    try:
        yield started
    finally:
        started.engine.shutdown()
        for sender in started.senders:
            sender.abandon()


def in_float32(spec: EngineSpec, bf16_modules=()):
    arguments = engine_arguments(spec, bf16_modules)
    arguments.dtype = "float32"
    return arguments


class Reference:
    """Greedy tokens of a model, by transformers in float32."""

    def __init__(self, directory) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def greedy(self, prompt, num_tokens: int) -> tuple[list[int], list[float]]:
        tokens, logprobs = [], []
        text, cache = torch.tensor([prompt]), None
        with torch.no_grad():
            for _ in range(num_tokens):
                out = self.model(text, past_key_values=cache, use_cache=True)
                best, cache = out.logits[0, -1].log_softmax(-1).max(-1), out.past_key_values
                tokens.append(int(best.indices))
                logprobs.append(float(best.values))
                text = best.indices[None, None]
        return tokens, logprobs


def remember(segments: Path, version: int, *said: list[int]) -> None:
    """Make these tokens the history of the prompt, with an error every 12 tokens."""
    past = [np.array([7 if at % 12 == 11 else t for at, t in enumerate(tokens)], dtype=np.int32) for tokens in said]
    responses = [PastResponse(token_ids=ids, step=0, sample=sample) for sample, ids in enumerate(past)]
    write_segment(segments, build_segment(KEY, version, responses))


async def greedy(live: Live, prompt=PROMPT, num_tokens: int = LENGTH):
    return await live.sample(prompt=prompt, temperature=0.0, max_response_tokens=num_tokens)
