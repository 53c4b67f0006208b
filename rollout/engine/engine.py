"""One rollout engine: vLLM's AsyncLLM and the responses in flight; its weights are `rollout.engine.weights`'s.

Invariant: tokens leave the engine once, when their whole group is finished.
"""

import asyncio
import pickle
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from history.drafting.stats import DraftStats
from rollout.engine.async_llm import LlmHandle
from rollout.engine.ordered_start import OrderedStart
from rollout.engine.responses import (
    NOTHING,
    Finished,
    Response,
    ResponseLedger,
    begun,
    check_length,
    columns,
    sampling_params,
    token_prompt,
)
from rollout.engine.spec import EngineSpec
from rollout.engine.state import (
    EngineState,
    EngineStats,
    EngineStatus,
)
from rollout.engine.vllm_args import end_of_sequence_ids, engine_arguments
from rollout.engine.weights import EngineWeights
from rollout.planning.migration import InFlight
from rollout.tracing.forwards import Forwards, decode_forwards
from rollout.types import (
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

EndedListener = Callable[[PromptGroup, int, TokenIds, FinishReason], None]
"""Called with group, sample, response ids and reason when a response has ended."""


class Engine:
    """A vLLM engine with versioned weights. All methods run on one event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._handle = LlmHandle(spec.name)
        self._ledger = ResponseLedger()
        self.weights = EngineWeights(spec, self._handle, self._ledger, self._settle)
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
        """Start vLLM. The engine is fenced afterwards, or serving version 0 if it loaded a directory.

        Raises:
            ValueError: the configuration asks vLLM for something that it does not have.
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

        With `summary` and `columns_so_far`, what another engine returned for the group, responses that were aborted
        go on where they were, and the others stay as they are. If vLLM's process dies, responses are aborted
        with the tokens that had come from it, and the summary says so (`fault`).

        Raises:
            ValueError: prompt and response do not fit the engine's longest request.
            RuntimeError: the engine failed in another way; the message names it.
        """
        check_length(group, self.spec.max_model_len)
        started_at_s = time.time()
        before = begun(summary, columns_so_far, len(group.seeds))
        responses: dict[int, Response] = {}
        finished = {sample: had for sample, had in enumerate(before) if had.reason is not FinishReason.ABORT}
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
        found = GroupSummary(
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
        return found, columns(group, ended)

    async def _collect_all(
        self, group: PromptGroup, responses: Mapping[int, Response], finished: dict[int, Finished]
    ) -> None:
        """Wait for all responses, into `finished` by sample, also if one of them fails.

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
        """Keep what responses had when vLLM's process died."""
        nothing = Finished(
            response_ids=NOTHING.response_ids,
            rollout_logprobs=NOTHING.rollout_logprobs,
            reason=FinishReason.ABORT,
            weight_spans=(WeightSpan(weight_version=self.weights.version, num_tokens=0),),
        )
        for sample, had in enumerate(before):
            if sample in finished:
                continue
            response = responses.get(sample)
            if response is None:  # it was never submitted
                finished[sample] = had.followed_by(nothing)
            else:
                emitted = vllm_compat.emitted(self._llm, response.request_id)
                finished[sample] = self._ledger.cut_off(response, emitted, self.weights.version)

    async def _submit_group(
        self, group: PromptGroup, before: Sequence[Finished], responses: dict[int, Response]
    ) -> None:
        """Hand a group to vLLM whole; while the engine is held, when the group's turn has come."""
        ordered_start = self._ordered_start
        if ordered_start is not None:
            await ordered_start.wait_for_turn(group.group_id)
        try:
            async with self._submitting:
                for sample, had in enumerate(before):
                    if had.reason is FinishReason.ABORT:
                        responses[sample] = await self._submit(group, sample, had)
            await self._note_ended(len(before) - len(responses))
        finally:
            if ordered_start is not None:
                await ordered_start.enter(group.group_id)

    async def _submit(self, group: PromptGroup, sample: int, had: Finished) -> Response:
        self._num_requests += 1
        queue = await self._llm.add_request(
            f"{group.group_id}-{self._num_requests}",
            token_prompt(np.concatenate([group.prompt.token_ids, had.response_ids]), salt=self.weights.salt),
            sampling_params(
                group.sampling,
                group.seeds[sample],
                self._stop_ids,
                group.prompt.prompt_id,
                group.step,
                num_begun=len(had.response_ids),
            ),
        )
        response = Response(
            group_id=group.group_id, num_prompt_tokens=len(group.prompt.token_ids), queue=queue, before=had
        )
        self._ledger.add(response)
        return response

    async def _collect(self, group: PromptGroup, sample: int, response: Response) -> Finished:
        output = response.queue.get_nowait() or await response.queue.get()
        assert isinstance(output, RequestOutput)
        finished = self._ledger.finish(response, output, self.weights.version)
        await self._note_ended(1)
        if self._on_ended is not None:
            self._on_ended(group, sample, finished.response_ids, finished.reason)
        return finished

    async def _note_ended(self, count: int) -> None:
        async with self._ended:
            self._num_ended += count
            self._ended.notify_all()

    async def ended_at_least(self, count: int) -> int:
        """Responses that have ended since the engine began; returns when they are at least `count`."""
        async with self._ended:
            await self._ended.wait_for(lambda: self._num_ended >= count)
            return self._num_ended

    def tell_ended(self, listener: EndedListener) -> None:
        """Call `listener` for every response that ends from now on, on the engine's event loop; it must not wait."""
        self._on_ended = listener

    def in_flight(self) -> list[InFlight]:
        """Groups with responses that have not ended, and how far those are."""
        return [
            InFlight(
                group_id=group_id,
                num_prompt_tokens=responses[0].num_prompt_tokens,
                emitted=tuple(
                    len(response.before.response_ids)
                    + (vllm_compat.num_emitted_tokens(self._llm, response.request_id) or 0)
                    for response in responses
                ),
            )
            for group_id, responses in self._ledger.by_group().items()
        ]

    async def abort(self, group_id: GroupId) -> int:
        """End a group's unfinished responses, which keep the tokens they have; returns how many there were."""
        requests = self._ledger.of_group(group_id)
        await self._llm.abort(requests, internal=True)
        return len(requests)

    async def hold(self) -> None:
        """Keep new groups waiting until `release()`, so that a step is submitted whole before it is sampled."""
        self._ordered_start = OrderedStart()
        await self._settle()

    async def release(self, group_ids: Sequence[GroupId]) -> None:
        """Wait for these groups, submit them in this order, then let sampling begin."""
        if self._ordered_start is None:
            raise RuntimeError(f"{self.spec.name} is not held")
        await self._ordered_start.admit(group_ids)
        self._ordered_start = None
        await self._settle()

    async def pause_sampling(self) -> None:
        """Sample nothing until `resume_sampling`; responses in flight wait, with their tokens, keys and values."""
        self._is_paused = True
        await self._settle()

    async def resume_sampling(self) -> None:
        """Sample again, as soon as there are weights to serve."""
        self._is_paused = False
        await self._settle()

    async def _settle(self) -> None:
        """Make vLLM run exactly if the engine serves, is neither held nor paused."""
        if self.weights.status is EngineStatus.SERVING and self._ordered_start is None and not self._is_paused:
            await self._llm.resume_generation()
        elif self.weights.status is EngineStatus.SERVING:
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    # -- what it is doing --------------------------------------------------------------------------

    def fault(self) -> str:
        """Why vLLM can sample no further; empty while it can."""
        return f"{self.spec.name}: vLLM's process has ended" if self._llm.errored else ""

    def state(self) -> EngineState:
        """The state now."""
        fault = self.weights.fault if self.weights.status is EngineStatus.FENCED else ""
        return EngineState(
            status=self.weights.status,
            weight_version=self.weights.version,
            held=self._ordered_start is not None,
            fault=fault,
        )

    def stats(self) -> EngineStats:
        """The counters now."""
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

    async def draft_stats(self) -> DraftStats:
        """What drafting did since the last call; all zeros in a stock engine."""
        (first, *_) = await self._handle.ranks("draft_stats")
        assert isinstance(first, bytes)
        found: DraftStats = pickle.loads(first)
        return found

    async def kernel_classes(self) -> dict[str, str]:
        """Kernel of each linear layer of rank 0, by the layer's name."""
        (first, *_) = await self._handle.ranks("kernel_classes")
        assert isinstance(first, list)
        return dict(first)

    async def kernel_notes(self) -> list[str]:
        """Sentences to be shown about these kernels; see `rollout.worker.exact_int8`."""
        (first, *_) = await self._handle.ranks("kernel_notes")
        assert isinstance(first, list)
        return first
