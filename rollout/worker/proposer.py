"""Drafts inside vLLM: which request each row of the batch is, and how far it may be drafted.

vLLM makes a `HistoryProposer` by name (`speculative_config`) and asks it after every forward for drafts
of all rows, without saying whose rows they are. The worker therefore binds it to its model runner, where
a row has a request and a request has the key of its prompt. Everything that is known of texts and
acceptance lives in `history.drafting.drafter`; here are only rows.

Invariants: a request has one slot of the drafter from the first forward that samples for it until vLLM
says that it has ended, preemptions and weight updates included; no draft reaches beyond the response's
limit or the engine's longest request, and all of them fit one forward, so that no row waits for its
neighbours' drafts; only the rank whose drafts are used drafts.
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
"""Where `SamplingParams.extra_args` carries a prompt's key (`history.types`); a request without one is not drafted."""
STEP = "step"
"""Where it carries the step that it is sampled for."""

_THREADS_BESIDE_GPUS = 4
"""That draft where the process would wait for a device; on a CPU its cores multiply matrices."""


class ModelRunner(Protocol):
    """What is read of vLLM's model runner (V1)."""

    input_batch: InputBatch
    requests: dict[str, CachedRequestState]
    """Every request that has not ended, those included that are not in the batch now."""
    max_model_len: int


class RowDrafter(Protocol):
    """What is asked of a drafter: `history.drafting.drafter.Drafter`, or another in its place."""

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int, step: int) -> int:
        """The slot of a request that appeared."""

    def close(self, slot: int) -> None:
        """The request is gone."""

    def propose(
        self,
        slots: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        num_tokens: npt.NDArray[np.int32],
        rooms: npt.NDArray[np.int32],
    ) -> list[list[int]]:
        """Drafts of a batch."""

    def drain(self) -> DraftStats:
        """What happened since the last call."""


class _Request(NamedTuple):
    slot: int
    """Of the drafter; -1 for a request that is not drafted."""
    limit: int
    """Most tokens of prompt and response together."""


class HistoryProposer:
    """vLLM's `custom_class` proposer of one rank."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._max_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_forward_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._graph_sizes = tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ())
        self._segments_dir = str(vllm_config.additional_config["drafts"]["segments_dir"])
        self._drafter: RowDrafter | None = None
        self._requests: dict[str, _Request] = {}
        self._row_ids: list[str] = []
        self._row_slots: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._row_limits: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def load_model(self, target_model: object) -> None:
        """There is none."""

    def bind(self, runner: ModelRunner, forward_ended: Callable[[], None]) -> None:
        """Draft from now on, for the rows of `runner`; to be called on the rank whose drafts are used.

        `forward_ended` is called before each proposal: what follows is not the forward's time.
        """
        # numba may not be imported before the CPU worker has initialised
        from history.drafting.compile import compile_kernels
        from history.drafting.forward_cost import ForwardCostModel

        self._runner = runner
        self._forward_ended = forward_ended
        self._cost_model = ForwardCostModel(verify_sizes=self._graph_sizes)
        compile_kernels()  # or load them, before the first request comes
        self._drafter = self.make_drafter(self._cost_model)

    def make_drafter(self, cost_model: "ForwardCostModel") -> RowDrafter:
        """The drafter of an engine."""
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
            sampled_token_ids: what each row has just emitted; nothing if a part of its prompt is still to be computed.
            num_tokens_no_spec: [at least R], tokens of each row's text, the emitted ones included.
            token_ids_cpu: [at least R, L], the texts.
            slot_mappings: of the key-value cache; unused.
        """
        if self._drafter is None:
            return [[] for _ in sampled_token_ids]
        self._forward_ended()
        num_rows = len(sampled_token_ids)
        slots, limits = self._rows()
        if not all(sampled_token_ids):
            slots = np.where([bool(ids) for ids in sampled_token_ids], slots, -1)
        num_tokens = num_tokens_no_spec[:num_rows]
        # a forward computes and emits one token of each row beside its draft
        most = min(self._max_draft_tokens, max(self._max_forward_tokens // num_rows - 1, 0))
        rooms = np.clip(limits - num_tokens - 1, 0, most)
        return self._drafter.propose(slots, token_ids_cpu[:num_rows], num_tokens, rooms)

    def observe(self, forward: ForwardRecord) -> None:
        """Learn what a forward costs, from one in which every row decoded."""
        if self._drafter is not None:
            self._cost_model.observe(
                num_rows=forward.num_running,
                num_tokens=forward.num_scheduled_tokens,
                num_context_tokens=forward.num_context_tokens,
                seconds=forward.seconds(),
            )

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests that vLLM will not run again."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None and self._drafter is not None:
                self._drafter.close(request.slot)

    def drain(self) -> DraftStats:
        """What drafting did since the last call."""
        return DraftStats() if self._drafter is None else self._drafter.drain()

    def _rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Slot and limit of each row, [R]; rows move when requests come and go."""
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
            )
            self._requests[request_id] = _Request(slot=slot, limit=limit)
        return self._requests[request_id]
