"""One vLLM engine in this process, with a given batch, context and draft lengths."""

import os
from collections.abc import Sequence
from typing import cast

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.rollout.scripted_proposer import ScriptedProposer
from benchmarks.rollout.traced_engine import Speculation, start_engine
from rollout.engine.spec import EngineSpec
from rollout.tracing.forwards import decode_forwards
from rollout.worker.proposer import PROMPT_KEY


class MeasuredEngine:
    """An engine that runs equal requests and verifies drafts of given lengths."""

    def __init__(self, spec: EngineSpec, *, vocabulary: int) -> None:
        speculation: Speculation | None = None
        if spec.drafts is not None:
            speculation = {
                "method": "custom_class",
                "model": f"{ScriptedProposer.__module__}.{ScriptedProposer.__name__}",
                "num_speculative_tokens": spec.drafts.max_draft_tokens,
            }
        self._engine, self._worker = start_engine(spec, speculation)
        self._has_drafts = spec.drafts is not None
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(os.getpid())
        self._requests: list[str] = []
        self._num_requests = 0

    def fill(self, batch: int, context: int, *, max_tokens: int) -> None:
        """Start `batch` requests with prompts of `context` random tokens and compute the prompts."""
        parameters = SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={PROMPT_KEY: 1},
        )
        for _ in range(batch):
            self._num_requests += 1
            self._requests.append(str(self._num_requests))
            ids = self._random.integers(1, self._vocabulary, context).tolist()
            self._engine.add_request(self._requests[-1], {"type": "token", "prompt_token_ids": ids}, parameters)
        self._set_lengths((0,))
        while not self._all_decode(batch):
            self._engine.step()

    def empty(self) -> None:
        """End all requests."""
        self._engine.abort_request(self._requests)
        self._requests = []
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._engine.step()

    def forwards(self, lengths: Sequence[int], num: int, num_settling: int) -> dict[str, int | float]:
        """Run `num` forwards with drafts of these lengths, repeated over the rows; returns the median forward."""
        self._set_lengths(lengths)
        for _ in range(num_settling):
            self._engine.step()
        self._worker.drain_trace()
        for _ in range(num):
            self._engine.step()
        trace = decode_forwards(self._worker.drain_trace())
        seconds = trace["seconds"].astype(np.float64)
        return {
            "num_rows": int(trace["num_running"][0]),
            "num_tokens": int(np.median(trace["num_scheduled_tokens"])),
            "num_context_tokens": int(np.median(trace["num_context_tokens"])),
            "seconds": float(np.median(seconds)),
            "seconds_p90": float(np.quantile(seconds, 0.9)),
            "num_forwards": len(trace),
        }

    def _set_lengths(self, lengths: Sequence[int]) -> None:
        if self._has_drafts:
            cast(ScriptedProposer, self._worker.model_runner.drafter).script.lengths = lengths

    def _all_decode(self, batch: int) -> bool:
        rows = self._worker.model_runner.input_batch
        num = len(rows.req_ids)
        return num == batch and bool((rows.num_tokens_no_spec[:num] > rows.num_prompt_tokens[:num]).all())
