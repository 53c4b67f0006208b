"""Forces an engine to emit recorded responses with real forwards.

Before the engine samples or verifies drafts, the logit of the recorded token is raised above all others in every row,
draft positions included. So the engine's own sampler emits the recording at any temperature and accepts a draft as far
as it agrees with the recording. A model of random weights then decodes like a trained one, with every method.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from history.types import TokenIds

RESPONSE = "response"
"""Key in `SamplingParams.extra_args` for the number of the response that a request must emit."""
_CERTAIN = 1e4


class Runner(Protocol):
    """The used part of vLLM's model runner (V1)."""

    input_batch: InputBatch
    requests: dict[str, CachedRequestState]

    def _sample(self, logits: torch.Tensor, metadata: SpecDecodeMetadata | None) -> SamplerOutput: ...


class ForcedSampler:
    """Replaces a runner's sampling method and calls it with changed logits."""

    def __init__(self, runner: Runner) -> None:
        self.responses: Sequence[TokenIds] | None = ()
        """Recorded responses by number; None: the model samples, and rows are only counted."""
        self.num_row_forwards = 0
        """Number of rows that emitted tokens, over all forwards."""
        self.num_drafted = 0
        """Number of verified draft tokens, over all forwards."""
        self._runner = runner
        self._sample = runner._sample
        runner._sample = self.sample  # type: ignore[method-assign]

    def sample(self, logits: torch.Tensor, metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        """Sample for R requests from logits [R + number of drafts, V], changed in place."""
        batch = self._runner.input_batch
        self.num_row_forwards += len(batch.req_ids)
        self.num_drafted += 0 if metadata is None else sum(metadata.num_draft_tokens)
        if self.responses is None:
            return self._sample(logits, metadata)
        drafts = [0] * len(batch.req_ids) if metadata is None else metadata.num_draft_tokens
        recorded = [
            self._tokens(
                self.responses, request_id, int(batch.num_tokens_no_spec[row] - batch.num_prompt_tokens[row]), 1 + num
            )
            for row, (request_id, num) in enumerate(zip(batch.req_ids, drafts, strict=True))
        ]
        tokens = torch.from_numpy(np.concatenate(recorded)).to(device=logits.device, dtype=torch.int64)
        logits[torch.arange(len(tokens), device=logits.device), tokens] = _CERTAIN
        return self._sample(logits, metadata)

    def num_emitted(self) -> int:
        """Number of tokens that the running requests have emitted."""
        batch = self._runner.input_batch
        rows = len(batch.req_ids)
        return int((batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows]).sum())

    def _tokens(self, responses: Sequence[TokenIds], request_id: str, position: int, num: int) -> TokenIds:
        """`num` recorded tokens from `position` on; zeros after the end."""
        arguments = self._runner.requests[request_id].sampling_params.extra_args
        tokens = responses[arguments[RESPONSE]][position : position + num]
        return np.pad(tokens, (0, num - len(tokens)))
