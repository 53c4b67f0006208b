"""Drafts inside vLLM: maps rows of the batch to requests, and bounds the length of each row's draft.

vLLM creates a `HistoryProposer` by name (`speculative_config`) and calls it after every forward for drafts of all rows,
without saying which requests the rows belong to. So the worker binds the proposer to its model runner, where each row
has a request and each request has the key of its prompt. Texts and acceptance are the business of
`history.drafting.drafter`; this file handles only rows.

Invariants: a request keeps one slot of the drafter from the first forward that samples for it until vLLM reports its
end, across preemptions and weight updates. No draft reaches beyond the response's limit or the engine's longest
request. All drafts of a batch fit into one forward, so no row waits for the drafts of other rows. Only the rank whose
drafts are used computes drafts.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from history.drafting.stats import DraftStats
from rollout.tracing.forwards import ForwardRecord

if TYPE_CHECKING:
    from history.drafting.forward_cost import ForwardCostModel

PROMPT_KEY = "prompt_key"
"""Key of the prompt's key in `SamplingParams.extra_args` (`history.types`); without it a request gets no drafts."""
STEP = "step"
"""Key of the step in `SamplingParams.extra_args`."""
COUNTED = "counted"
"""Key of whether draft statistics count the request, in `SamplingParams.extra_args`."""

_THREADS_BESIDE_GPUS = 4
"""Threads that draft on a GPU engine, whose process would only wait; on a CPU the cores multiply matrices."""


class ModelRunner(Protocol):
    """The attributes of vLLM's model runner (V1) that this file reads."""

    input_batch: InputBatch
    requests: dict[str, CachedRequestState]
    """Every request that has not ended, including requests outside the current batch."""
    max_model_len: int


class RowDrafter(Protocol):
    """The interface of a drafter: `history.drafting.drafter.Drafter`, or a benchmark's replacement."""

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int, step: int, is_counted: bool) -> int:
        """Register a new request; returns its slot."""

    def close(self, slot: int) -> None:
        """Release the slot of a request that has ended."""

    def propose(
        self,
        slots: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        num_tokens: npt.NDArray[np.int32],
        rooms: npt.NDArray[np.int32],
    ) -> list[list[int]]:
        """Drafts of a batch, one per row."""

    def drain(self, *, keeps_requests: bool) -> DraftStats:
        """Statistics since the last call; with `keeps_requests` those of requests are reported again."""


class _Request(NamedTuple):
    slot: int
    """Slot of the drafter; -1 for a request without drafts."""
    limit: int
    """Upper bound of prompt and response tokens together."""


class HistoryProposer:
    """vLLM's `custom_class` proposer of one rank."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._max_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_forward_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._compilation = vllm_config.compilation_config
        self._segments_dir = str(vllm_config.additional_config["drafts"]["segments_dir"])
        self._drafter: RowDrafter | None = None
        self._requests: dict[str, _Request] = {}
        self._row_ids: list[str] = []
        self._row_slots: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._row_limits: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def load_model(self, target_model: object) -> None:
        """Do nothing: there is no draft model."""

    def bind(self, runner: ModelRunner, forward_ended: Callable[[], None]) -> None:
        """Start drafting for the rows of `runner`; called only on the rank whose drafts are used.

        `forward_ended` is called before each proposal, so that drafting does not count as the forward's time.
        """
        # numba may not be imported before the CPU worker has initialised
        from history.drafting.compile import compile_kernels
        from history.drafting.forward_cost import ForwardCostModel

        self._runner = runner
        self._forward_ended = forward_ended
        # not earlier: vLLM changes the sizes of graphs when it sizes the KV cache, after it has made the proposer
        self._cost_model = ForwardCostModel(verify_sizes=self._compilation.cudagraph_capture_sizes or ())
        compile_kernels()  # or load them from the cache, before the first request
        self._drafter = self.make_drafter(self._cost_model)

    def make_drafter(self, cost_model: "ForwardCostModel") -> RowDrafter:
        """Make the drafter of an engine."""
        from history.drafting.drafter import Drafter

        return Drafter(
            max_draft_tokens=self._max_draft_tokens,
            segments_dir=self._segments_dir,
            cost_model=cost_model,
            max_model_len=self._runner.max_model_len,
            num_threads=_THREADS_BESIDE_GPUS if current_platform.is_cuda_alike() else 1,
        )

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return one draft per row.

        Args:
            sampled_token_ids: tokens that each row has just emitted; empty while the row is in prefill.
            num_tokens_no_spec: [at least R], number of tokens of each row's text, including the emitted tokens.
            token_ids_cpu: [at least R, L], the texts.
            slot_mappings: slots of the key-value cache; unused.
        """
        if self._drafter is None:
            return [[] for _ in sampled_token_ids]
        self._forward_ended()
        num_rows = len(sampled_token_ids)
        slots, limits = self._rows()
        if not all(sampled_token_ids):
            slots = np.where([bool(ids) for ids in sampled_token_ids], slots, -1)
        num_tokens = num_tokens_no_spec[:num_rows]
        # beside its draft, each row computes one token in a forward
        most = min(self._max_draft_tokens, max(self._max_forward_tokens // num_rows - 1, 0))
        rooms = np.clip(limits - num_tokens - 1, 0, most)
        return self._drafter.propose(slots, token_ids_cpu[:num_rows], num_tokens, rooms)

    def observe(self, forward: ForwardRecord) -> None:
        """Update the cost model with a forward in which every row decoded."""
        if self._drafter is not None:
            self._cost_model.observe(
                num_rows=forward.num_running,
                num_tokens=forward.num_scheduled_tokens,
                num_context_tokens=forward.num_context_tokens,
                seconds=forward.seconds(),
            )

    def end(self, request_ids: Iterable[str]) -> None:
        """Release the slots of requests that vLLM will not run again."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None and self._drafter is not None:
                self._drafter.close(request.slot)

    def drain(self, *, keeps_requests: bool = False) -> DraftStats:
        """Drafting statistics since the last call; with `keeps_requests` those of requests are reported again."""
        return DraftStats() if self._drafter is None else self._drafter.drain(keeps_requests=keeps_requests)

    def _rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Slot and limit of each row, [R]; rows change when requests start and end."""
        row_ids = self._runner.input_batch.req_ids
        if row_ids != self._row_ids:
            self._row_ids = list(row_ids)
            rows = [self._request(request_id) for request_id in row_ids]
            self._row_slots = np.array([row.slot for row in rows], dtype=np.int64)
            self._row_limits = np.array([row.limit for row in rows], dtype=np.int32)
        return self._row_slots, self._row_limits

    def _request(self, request_id: str) -> _Request:
        if request_id not in self._requests:
            state = self._runner.requests[request_id]
            extra = state.sampling_params.extra_args or {}
            if PROMPT_KEY not in extra:
                return _Request(slot=-1, limit=0)
            limit = min(state.num_prompt_tokens + state.sampling_params.max_tokens, self._runner.max_model_len)
            assert self._drafter is not None
            slot = self._drafter.open(
                prompt_key=extra[PROMPT_KEY],
                prompt_length=state.num_prompt_tokens,
                max_length=limit,
                step=extra.get(STEP, 0),
                is_counted=extra.get(COUNTED, True),
            )
            self._requests[request_id] = _Request(slot=slot, limit=limit)
        return self._requests[request_id]
