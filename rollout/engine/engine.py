"""One rollout engine: vLLM's AsyncLLM and the responses in flight. `rollout.engine.weights` has its weights.

Invariant: tokens leave the engine once, when their whole group is finished.
"""

import asyncio
import pickle
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from history.drafting.stats import DraftStats
from rollout.engine.async_llm import LlmHandle
from rollout.engine.ordered_start import OrderedStart
from rollout.engine.responses import (
    EMPTY,
    Finished,
    Response,
    ResponseLedger,
    check_length,
    columns,
    draft_args,
    earlier_parts,
    sampling_params,
    token_prompt,
)
from rollout.engine.spec import EngineSpec
from rollout.engine.state import (
    EngineProgress,
    EngineState,
    EngineStats,
    EngineStatus,
)
from rollout.engine.vllm_args import engine_arguments
from rollout.engine.weights import EngineWeights
from rollout.planning.migration import InFlight
from rollout.stop_ids import end_of_sequence_ids
from rollout.tracing.forwards import Forwards, decode_forwards
from rollout.types import (
    TRAIN,
    FinishReason,
    GroupColumns,
    GroupId,
    GroupSummary,
    PromptGroup,
    TokenIds,
    WeightSpan,
)
from rollout.weights.checkpoint_tensors import expected_tensors, linears_in_bf16
from rollout.weights.format import WeightFormat
from rollout.worker import vllm_compat

_CANCEL_TIMEOUT_S = 30.0
_CANCEL_POLL_S = 0.02

EndedListener = Callable[[PromptGroup, int, TokenIds, FinishReason], None]
"""Called with group, sample, response ids and reason when a response has ended."""


class Engine:
    """A vLLM engine with versioned weights. All methods run on one event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._handle = LlmHandle(spec.name)
        self._ledger = ResponseLedger()
        self.weights = EngineWeights(
            spec, self._handle, self._ledger, sync_vllm=self._sync_vllm, submit_again=self._submit_again
        )
        self._ordered_start: OrderedStart | None = None
        self._is_paused = False
        self._num_requests = 0
        self._num_ended = 0
        self._ended = asyncio.Condition()
        self._submitting = asyncio.Lock()
        self._stop_ids: tuple[int, ...] = ()
        self._on_ended: EndedListener | None = None

    @property
    def _llm(self) -> AsyncLLM:
        return self._handle.llm

    async def start(self) -> None:
        """Start vLLM. The engine is then fenced, or serves version 0 if it loaded a directory.

        Raises:
            ValueError: the configuration asks for something that vLLM lacks.
        """
        self._stop_ids = end_of_sequence_ids(self.spec.directory)
        loads = self.spec.load_from_directory
        expected = () if loads else expected_tensors(self.spec.directory, WeightFormat.of(self.spec.config))
        await self._handle.start(engine_arguments(self.spec, linears_in_bf16(expected)))
        await self._handle.ranks("forget_shared_memory")
        await self.weights.begin(expected)

    def shutdown(self) -> None:
        """Stop vLLM and its processes."""
        self._handle.shutdown()

    # -- responses ---------------------------------------------------------------------------------

    async def generate_group(
        self, group: PromptGroup, summary: GroupSummary | None = None, columns_so_far: GroupColumns | None = None
    ) -> tuple[GroupSummary, GroupColumns]:
        """Sample all responses of a group; returns when the last one has ended.

        `summary` and `columns_so_far` are the result of another engine for an interrupted group: aborted responses
        continue, and the others stay unchanged. If vLLM's process dies, running responses are aborted with the tokens
        received so far, and `fault` of the summary is set.

        Raises:
            ValueError: prompt and response together exceed `max_model_len`.
            RuntimeError: the engine failed in another way; the message names the engine.
        """
        check_length(group, self.spec.max_model_len)
        started_at_s = time.time()
        before = earlier_parts(summary, columns_so_far, len(group.seeds))
        responses: dict[int, Response] = {}
        finished = {sample: part for sample, part in enumerate(before) if part.reason is not FinishReason.ABORT}
        fault = ""
        try:
            await self._submit_group(group, before, responses)
            await self._collect_all(group, responses, finished)
        except vllm_compat.DEAD as error:
            fault = f"{self.spec.name}: {error}"
            await self._cut_off(before, responses, finished)
        except asyncio.CancelledError:
            await self._llm.abort([response.request_id for response in responses.values()], internal=True)
            self._ledger.drop(responses.values())
            raise
        except Exception as error:  # the border to vLLM's processes: any failure there ends the requests with it
            self._ledger.drop(responses.values())
            raise RuntimeError(f"{self.spec.name} failed while it sampled group {group.group_id}: {error}") from error
        ended = [finished[sample] for sample in range(len(before))]
        result = GroupSummary(
            group_id=group.group_id,
            engine_id=self.spec.engine_id,
            num_prompt_tokens=len(group.prompt.token_ids),
            lengths=tuple(len(f.response_ids) for f in ended),
            finish_reasons=tuple(f.reason for f in ended),
            weight_spans=tuple(f.weight_spans for f in ended),
            started_at_s=started_at_s,
            finished_at_s=time.time(),
            fault=fault,
        )
        return result, columns(group, ended)

    async def _collect_all(
        self, group: PromptGroup, responses: Mapping[int, Response], finished: dict[int, Finished]
    ) -> None:
        """Wait for all responses, even if one fails; `finished` receives them by sample.

        Raises:
            Exception: the first failure.
        """

        async def collect(sample: int, response: Response) -> None:
            finished[sample] = await self._collect(group, sample, response)

        collecting = (collect(sample, response) for sample, response in responses.items())
        for failure in await asyncio.gather(*collecting, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _cut_off(
        self, before: Sequence[Finished], responses: Mapping[int, Response], finished: dict[int, Finished]
    ) -> None:
        """Close unfinished responses with the tokens received before vLLM's process died."""
        nothing = Finished(
            response_ids=EMPTY.response_ids,
            rollout_logprobs=EMPTY.rollout_logprobs,
            resampled=EMPTY.resampled,
            reason=FinishReason.ABORT,
            weight_spans=(WeightSpan(weight_version=self.weights.version, num_tokens=0),),
        )
        for sample, earlier in enumerate(before):
            if sample in finished:
                continue
            response = responses.get(sample)
            if response is None:  # not submitted yet
                finished[sample] = earlier.followed_by(nothing)
            else:
                emitted = vllm_compat.emitted(self._llm, response.request_id)
                finished[sample] = self._ledger.cut_off(response, emitted, self.weights.version)

    async def _submit_group(
        self, group: PromptGroup, before: Sequence[Finished], responses: dict[int, Response]
    ) -> None:
        """Submit a whole group to vLLM; while the engine is held, wait for the group's turn."""
        ordered_start = self._ordered_start
        if ordered_start is not None:
            await ordered_start.wait_for_turn(group.group_id)
        try:
            async with self._submitting:
                for sample, earlier in enumerate(before):
                    if earlier.reason is FinishReason.ABORT:
                        responses[sample] = await self._submit(group, sample, earlier)
            await self._count_ended(len(before) - len(responses))
        finally:
            if ordered_start is not None:
                await ordered_start.enter(group.group_id)

    async def _submit(self, group: PromptGroup, sample: int, earlier: Finished) -> Response:
        salt = self.weights.salt
        queue = await self._request(group, sample, earlier, salt)
        response = Response(group=group, sample=sample, queue=queue, salt=salt, before=earlier)
        self._ledger.add(response)
        return response

    async def _request(self, group: PromptGroup, sample: int, earlier: Finished, salt: str) -> RequestOutputCollector:
        """Ask vLLM for the rest of a response."""
        self._num_requests += 1
        return await self._llm.add_request(
            f"{group.group_id}-{self._num_requests}",
            token_prompt(np.concatenate([group.prompt.token_ids, earlier.response_ids]), salt=salt),
            sampling_params(
                group.sampling,
                group.seeds[sample],
                self._stop_ids,
                draft_args(group.prompt.prompt_id, group.step, is_counted=group.purpose == TRAIN),
                emitted=len(earlier.response_ids),
            ),
        )

    async def _submit_again(self) -> None:
        """Replace the requests without a token that have an outdated salt; vLLM is paused."""
        async with self._submitting:  # a group that was being submitted has read the old salt
            salt = self.weights.salt
            for response in self._ledger.salted_otherwise(salt):
                if vllm_compat.num_emitted_tokens(self._llm, response.request_id) == 0:
                    await self._replace_request(response, salt)

    async def _replace_request(self, response: Response, salt: str) -> None:
        """Give a response another request, with this salt, unless it is aborted meanwhile."""
        replaced = response.request_id
        queue = await self._request(response.group, response.sample, response.before, salt)
        if vllm_compat.num_emitted_tokens(self._llm, replaced) is None:
            await self._llm.abort([queue.request_id], internal=True)
            return
        response.queue, response.salt = queue, salt
        await self._llm.abort([replaced], internal=True)

    async def _collect(self, group: PromptGroup, sample: int, response: Response) -> Finished:
        output = await self._output(response)
        finished = self._ledger.finish(response, output, self.weights.version)
        await self._count_ended(1)
        if self._on_ended is not None:
            self._on_ended(group, sample, finished.response_ids, finished.reason)
        return finished

    async def _output(self, response: Response) -> RequestOutput:
        """Wait until a response ends; a replaced request ends before its response does."""
        while True:
            queue = response.queue
            output = queue.get_nowait() or await queue.get()
            if queue is response.queue:
                assert isinstance(output, RequestOutput)
                return output

    async def _count_ended(self, count: int) -> None:
        async with self._ended:
            self._num_ended += count
            self._ended.notify_all()

    async def ended_at_least(self, count: int) -> int:
        """Wait until at least `count` responses have ended since the engine's start; returns their number."""
        async with self._ended:
            await self._ended.wait_for(lambda: self._num_ended >= count)
            return self._num_ended

    def on_response_ended(self, listener: EndedListener) -> None:
        """Call `listener` for every response that ends from now on, on the engine's event loop; it must not block."""
        self._on_ended = listener

    def in_flight(self) -> list[InFlight]:
        """Groups with running responses, and the tokens of each running response."""
        return [
            InFlight(
                group_id=group_id,
                num_prompt_tokens=len(responses[0].group.prompt.token_ids),
                emitted=tuple(
                    len(response.before.response_ids)
                    + (vllm_compat.num_emitted_tokens(self._llm, response.request_id) or 0)
                    for response in responses
                ),
            )
            for group_id, responses in self._ledger.by_group().items()
        ]

    async def abort(self, group_id: GroupId) -> int:
        """Abort a group's unfinished responses, which keep their tokens; returns the number of aborted responses."""
        requests = self._ledger.of_group(group_id)
        await self._llm.abort(requests, internal=True)
        return len(requests)

    async def hold(self) -> None:
        """Hold new groups until `release()`, so that a whole step is submitted before sampling."""
        self._ordered_start = OrderedStart()
        await self._sync_vllm()

    async def release(self, group_ids: Sequence[GroupId]) -> None:
        """Wait for these groups, submit them in this order, then start sampling."""
        if self._ordered_start is None:
            raise RuntimeError(f"{self.spec.name} is not held")
        await self._ordered_start.admit(group_ids)
        self._ordered_start = None
        await self._sync_vllm()

    async def pause_sampling(self) -> None:
        """Stop sampling until `resume_sampling`; responses in flight keep their tokens, keys and values."""
        self._is_paused = True
        await self._sync_vllm()

    async def resume_sampling(self) -> None:
        """Sample again as soon as the engine serves weights."""
        self._is_paused = False
        await self._sync_vllm()

    async def start_over(self) -> None:
        """Be as after `start`, for another trainer that publishes an earlier version; responses were cancelled before.

        Raises:
            TimeoutError: responses are still in flight.
        """
        async with asyncio.timeout(_CANCEL_TIMEOUT_S):
            while len(self._ledger):
                await asyncio.sleep(_CANCEL_POLL_S)
        self._is_paused = False
        async with self._ended:
            self._num_ended = 0
        await self.weights.forget()

    @property
    def _can_sample(self) -> bool:
        return self.weights.status is EngineStatus.SERVING and self._ordered_start is None and not self._is_paused

    def progress(self) -> EngineProgress:
        """How far the engine is."""
        running = sum(sum(group.emitted) for group in self.in_flight())
        return EngineProgress(num_tokens=self._ledger.num_tokens + running, can_sample=self._can_sample)

    async def _sync_vllm(self) -> None:
        """Let vLLM run if the engine can sample; otherwise pause it."""
        if self._can_sample:
            await self._llm.resume_generation()
        elif self.weights.status is EngineStatus.SERVING:
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    # -- state and counters ------------------------------------------------------------------------

    async def ping(self) -> None:
        """Return when every rank has answered."""
        await self._handle.ranks("ping")

    def fault(self) -> str:
        """Why vLLM can sample no further; empty while it can."""
        return f"{self.spec.name}: vLLM's process has ended" if self._llm.errored else ""

    def state(self) -> EngineState:
        """The current state."""
        fault = self.weights.fault if self.weights.status is EngineStatus.FENCED else ""
        return EngineState(
            status=self.weights.status,
            weight_version=self.weights.version,
            held=self._ordered_start is not None,
            fault=fault,
        )

    def stats(self) -> EngineStats:
        """The current counters."""
        return EngineStats(
            num_running=len(self._ledger),
            num_finished=self._ledger.num_finished,
            num_tokens=self._ledger.num_tokens,
            num_updates=self.weights.num_updates,
            num_refused=self.weights.num_refused,
            num_failed=self.weights.num_failed,
        )

    async def drain_trace(self) -> Forwards:
        """Forwards of rank 0 since the last call, [N] of `rollout.tracing.forwards.FORWARD`."""
        (first, *_) = await self._handle.ranks("drain_trace")
        assert isinstance(first, bytes)
        return decode_forwards(first)

    async def draft_stats(self, keeps_requests: bool = False) -> DraftStats:
        """Draft counters since the last call; zeros in a baseline engine.

        With `keeps_requests` the next call returns the numbers of requests again, with those since.
        """
        (first, *_) = await self._handle.ranks("draft_stats", keeps_requests)
        assert isinstance(first, bytes)
        stats: DraftStats = pickle.loads(first)
        return stats

    async def kernel_classes(self) -> dict[str, str]:
        """Matrix-product kernel of each linear layer of rank 0, by layer name."""
        (first, *_) = await self._handle.ranks("kernel_classes")
        assert isinstance(first, list)
        return dict(first)

    async def kernel_notes(self) -> list[str]:
        """Messages for the user about these kernels; see `rollout.worker.exact_int8`."""
        (first, *_) = await self._handle.ranks("kernel_notes")
        assert isinstance(first, list)
        return first
