"""One rollout engine: vLLM's AsyncLLM, its weight version, and the responses in flight.

States (decision 3): `serving(v)` -> `paused` -> `applying(v + 1)` -> `serving(v + 1)`, or `fenced`. A
new engine is fenced at version -1 until publish 0. An engine that is not serving samples nothing and
keeps its requests: they wait inside vLLM. At an update those that are running go on after their keys and values have
been recomputed under the new weights, or with the old ones, or are waited for (`EngineSpec.in_flight`).

Versions are stamped here (decision 5): at each update, after the last output of the old weights has
been counted, every response notes how many tokens it had.

Invariants: no token is sampled between the first applied byte of an update and `resume`; a fault found
before that byte changes nothing; tokens leave the engine once, when their whole group is finished.
"""

import asyncio
import pickle
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from history.draft_stats import DraftStats
from rollout import vllm_compat
from rollout.engine_config import end_of_sequence_ids, engine_arguments
from rollout.engine_responses import (
    Finished,
    Response,
    ResponseLedger,
    check_length,
    columns,
    sampling_params,
    token_prompt,
)
from rollout.engine_spec import EngineSpec
from rollout.engine_state import (
    EngineFencedError,
    EngineState,
    EngineStats,
    EngineStatus,
    UpdateTimes,
    WeightsRefusedError,
)
from rollout.engine_trace import Forwards, decode_forwards
from rollout.model_tensors import check_manifest, expected_tensors, linears_in_bf16
from rollout.receiver import UpdateOrder
from rollout.roll_call import RollCall
from rollout.transports.base import Channel, GroupChannel, ShmChannel
from rollout.transports.shm import verify_segments
from rollout.types import (
    FinishReason,
    GroupColumns,
    GroupId,
    GroupSummary,
    PromptGroup,
    TokenIds,
    WeightVersion,
)
from rollout.weight_format import WeightFormat
from rollout.weight_sums import add_up
from rollout.wire import Box, TensorSpec, Wanted, WeightManifest

ARRIVAL_POLL_S = 0.005
GRACE_S = 30.0
"""A rank names the peer that is late by itself; the engine waits so much longer before it gives the rank up."""


EndedListener = Callable[[PromptGroup, int, TokenIds, FinishReason], None]
"""Called with group, sample, response ids and reason when a response has ended."""


class Engine:
    """A vLLM engine with versioned weights. All methods run on one event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._status = EngineStatus.FENCED
        self._version = WeightVersion(-1)
        self._fault = "no weights have been published yet"
        self._roll_call: RollCall | None = None
        self._channel: Channel | None = None
        self._ledger = ResponseLedger()
        self._num_requests = self._num_updates = self._num_refused = self._num_failed = 0
        self._updating = asyncio.Lock()
        self._submitting = asyncio.Lock()
        self._expected: tuple[TensorSpec, ...] = ()
        self.wanted: list[Wanted] = []
        """What each rank takes of a publish, once the engine has started."""
        self._stop_ids: tuple[int, ...] = ()
        self._started: AsyncLLM | None = None
        self._on_ended: EndedListener | None = None

    @property
    def _llm(self) -> AsyncLLM:
        if self._started is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        return self._started

    async def start(self) -> None:
        """Start vLLM. The engine is fenced afterwards, or serving version 0 if it loaded a directory.

        Raises:
            ValueError: the configuration asks vLLM for something that it does not have.
        """
        self._stop_ids = end_of_sequence_ids(self.spec.directory)
        if not self.spec.load_from_directory:
            self._expected = expected_tensors(self.spec.directory, WeightFormat.of(self.spec.config))
        arguments = engine_arguments(self.spec, linears_in_bf16(self._expected))
        self._started = AsyncLLM.from_engine_args(arguments)
        await self._llm.get_supported_tasks()
        await self._ranks("forget_shared_memory")
        if self.spec.load_from_directory:
            self._status, self._version, self._fault = EngineStatus.SERVING, WeightVersion(0), ""
        else:
            found = await self._ranks("wanted", pickle.dumps(self._expected))
            self.wanted = [pickle.loads(one) for one in found if isinstance(one, bytes)]
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    def shutdown(self) -> None:
        """Stop vLLM and its processes."""
        if self._started is not None:
            self._started.shutdown()
            self._started = None

    # -- responses ---------------------------------------------------------------------------------

    async def generate_group(self, group: PromptGroup) -> tuple[GroupSummary, GroupColumns]:
        """Sample all responses of a group; returns when the last one has ended.

        Raises:
            ValueError: prompt and response do not fit the engine's longest request.
            RuntimeError: the engine died; the message names it.
        """
        check_length(group, self.spec.max_model_len)
        started_at_s = time.time()
        responses: list[Response] = []
        try:
            await self._submit_group(group, responses)
            finished = await asyncio.gather(*(self._collect(group, *each) for each in enumerate(responses)))
        except asyncio.CancelledError:
            await self._llm.abort([response.request_id for response in responses], internal=True)
            self._ledger.drop(responses)
            raise
        except Exception as error:  # the border to vLLM's processes: any failure there ends the requests with it
            self._ledger.drop(responses)
            raise RuntimeError(f"{self.spec.name} failed while it sampled group {group.group_id}: {error}") from error
        summary = GroupSummary(
            group_id=group.group_id,
            engine_id=self.spec.engine_id,
            num_prompt_tokens=len(group.prompt.token_ids),
            lengths=tuple(len(f.response_ids) for f in finished),
            finish_reasons=tuple(f.reason for f in finished),
            weight_spans=tuple(f.weight_spans for f in finished),
            started_at_s=started_at_s,
            finished_at_s=time.time(),
        )
        return summary, columns(group, finished)

    async def _submit_group(self, group: PromptGroup, responses: list[Response]) -> None:
        """Hand a group to vLLM whole; while the engine is held, when the group's turn has come."""
        roll_call = self._roll_call
        if roll_call is not None:
            await roll_call.wait_for_turn(group.group_id)
        try:
            async with self._submitting:
                for seed in group.seeds:
                    responses.append(await self._submit(group, seed))
        finally:
            if roll_call is not None:
                await roll_call.enter(group.group_id)

    async def _submit(self, group: PromptGroup, seed: int) -> Response:
        self._num_requests += 1
        queue = await self._llm.add_request(
            f"{group.group_id}-{self._num_requests}",
            token_prompt(group.prompt.token_ids, salt=self._salt),
            sampling_params(group.sampling, seed, self._stop_ids, group.prompt.prompt_id, group.step),
        )
        response = Response(group_id=group.group_id, queue=queue)
        self._ledger.add(response)
        return response

    @property
    def _salt(self) -> str:
        """What cached prefixes of new requests are kept apart by; those of old weights stay where caches are kept."""
        return f"weights {self._version}" if self.spec.in_flight == "keep_kv" else ""

    async def _collect(self, group: PromptGroup, sample: int, response: Response) -> Finished:
        output = response.queue.get_nowait() or await response.queue.get()
        assert isinstance(output, RequestOutput)
        finished = self._ledger.finish(response, output, self._version)
        if self._on_ended is not None:
            self._on_ended(group, sample, finished.response_ids, finished.reason)
        return finished

    def tell_ended(self, listener: EndedListener) -> None:
        """Call `listener` for every response that ends from now on, on the engine's event loop; it must not wait."""
        self._on_ended = listener

    async def abort(self, group_id: GroupId) -> int:
        """End a group's unfinished responses, which keep the tokens they have; returns how many there were."""
        requests = self._ledger.of_group(group_id)
        await self._llm.abort(requests, internal=True)
        return len(requests)

    async def hold(self) -> None:
        """Keep new groups waiting until `release()`, so that a step is submitted whole before it is sampled."""
        self._roll_call = RollCall()
        await self._settle()

    async def release(self, group_ids: Sequence[GroupId]) -> None:
        """Wait for these groups, submit them in this order, then let sampling begin."""
        if self._roll_call is None:
            raise RuntimeError(f"{self.spec.name} is not held")
        await self._roll_call.admit(group_ids)
        self._roll_call = None
        await self._settle()

    async def _settle(self) -> None:
        """Make vLLM run exactly if the engine serves and is not held."""
        if self._status is EngineStatus.SERVING and self._roll_call is None:
            await self._llm.resume_generation()
        elif self._status is EngineStatus.SERVING:
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    # -- weights -----------------------------------------------------------------------------------

    async def init_transport(self, channel: Channel) -> None:
        """Join the channel that publishes come through; an earlier one is left.

        Raises:
            RuntimeError: the other end did not come.
        """
        async with self._updating:
            self._channel = None
            await self._ranks("open_channel", pickle.dumps(channel))
            self._channel = channel

    def check(self, manifest: WeightManifest) -> None:
        """Find the faults that a manifest alone shows; costs nothing, so ask every engine before anything is sent.

        Raises:
            WeightsRefusedError: of another run or format, stale, inconsistent, not what the model consists of, or
                lacking a part that a rank takes.
        """
        try:
            check_manifest(
                manifest,
                self._expected,
                run_id=self.spec.run_id,
                format=self.spec.config.format,
                current=self._version,
            )
            for rank, wanted in enumerate(self.wanted):
                manifest.check_wanted(rank, wanted)
        except RuntimeError as error:
            raise self._refusal(manifest, error) from error

    async def update(self, manifest: WeightManifest, segments: Mapping[int, str] | None = None) -> UpdateTimes:
        """Apply one publish. Afterwards the engine is `applying`: probe it, then `resume()` or `fence()` it.

        Args:
            manifest: what comes.
            segments: for staged transports, as in `UpdateOrder`.

        Raises:
            WeightsRefusedError: nothing was touched, the engine goes on as before. A streaming channel is closed.
            EngineFencedError: the weights are mixed, the engine is fenced. A streaming channel is closed.
        """
        timeout_s, started = self.spec.config.update_timeout_s, time.perf_counter()
        order = UpdateOrder(manifest=manifest, segments=dict(segments or {}), timeout_s=timeout_s)
        async with self._updating:
            try:
                self.check(manifest)
                await self._announce(order)
            except WeightsRefusedError:
                await self._leave_stream()
                await self._settle()  # it may have been drained
                raise
            arrived = time.perf_counter()
            in_flight, num_thrown = len(self._ledger), await self._pause()
            paused = time.perf_counter()
            await self._apply(order)
            done = time.perf_counter()
        return UpdateTimes(
            arrive_s=arrived - started,
            pause_s=paused - arrived,
            apply_s=done - paused,
            num_in_flight=in_flight,
            num_recomputed_tokens=num_thrown,
        )

    async def drain(self) -> None:
        """Start no further response, and return when those that have begun are finished; an update comes next."""
        async with self._updating:
            if self._status is EngineStatus.SERVING:
                await self._llm.pause_generation(mode="wait", clear_cache=True)

    async def _announce(self, order: UpdateOrder) -> None:
        """Return when there is verified data to apply: all of a staged publish, the first bucket of a streamed one."""
        try:
            if isinstance(self._channel, ShmChannel):
                await asyncio.to_thread(verify_segments, order.manifest, order.segments)
            await self._ranks("expect_weights", pickle.dumps(order))
            while not all(await self._ranks("weights_arrived")):
                await asyncio.sleep(ARRIVAL_POLL_S)
        except RuntimeError as error:
            raise self._refusal(order.manifest, error) from error

    def _refusal(self, manifest: WeightManifest, error: RuntimeError) -> WeightsRefusedError:
        self._num_refused += 1
        return WeightsRefusedError(f"{self.spec.name} refused weight version {manifest.weight_version}: {error}")

    async def _leave_stream(self) -> None:
        """Close a channel whose senders would wait for us in vain."""
        if isinstance(self._channel, GroupChannel):
            self._channel = None
            await self._ranks("close_channel")

    async def _pause(self) -> int:
        """Sample no further token; returns of how many tokens the keys and values were thrown away."""
        await self._stop()
        await vllm_compat.drain(self._llm)
        if self._status is EngineStatus.SERVING:
            self._ledger.stamp(self._version, lambda request: vllm_compat.num_emitted_tokens(self._llm, request))
            self._status = EngineStatus.PAUSED
        if self.spec.in_flight == "keep_kv":
            return 0
        return sum(vllm_compat.num_context_tokens(self._llm, request) for request in self._ledger.request_ids())

    async def _stop(self) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=self.spec.in_flight != "keep_kv")

    async def _apply(self, order: UpdateOrder) -> None:
        version = order.manifest.weight_version
        self._status = EngineStatus.APPLYING
        try:
            async with asyncio.timeout(order.timeout_s + GRACE_S):
                await self._ranks("apply_weights", version)
        except (RuntimeError, TimeoutError) as error:
            self._num_failed += 1
            self._fence(f"weight version {version} failed: {error or 'the ranks do not answer'}")
            if isinstance(error, RuntimeError):
                await self._leave_stream()
            raise EngineFencedError(f"{self.spec.name} is fenced: {self._fault}") from error
        await vllm_compat.note_weight_version(self._llm, version)
        self._num_updates += 1
        self._version = version

    def _fence(self, fault: str) -> None:
        self._status, self._fault = EngineStatus.FENCED, fault

    async def fence(self, fault: str) -> None:
        """Forbid sampling until the next full publish, for a reason found outside, such as a failed probe."""
        async with self._updating:
            if self._status is EngineStatus.SERVING:
                await self._pause()
            self._fence(fault)

    async def resume(self) -> None:
        """Serve the weights that the last update applied.

        Raises:
            RuntimeError: there is no finished update to serve.
        """
        async with self._updating:
            if self._status is not EngineStatus.APPLYING:
                raise RuntimeError(
                    f"{self.spec.name} is {self._status.value}, there is nothing to resume: {self._fault}"
                )
            self._status, self._fault = EngineStatus.SERVING, ""
            await self._settle()

    async def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities at temperature 1 of a prompt's tokens given those before them, [len(token_ids) - 1].

        Raises:
            RuntimeError: the engine is fenced.
        """
        async with self._updating:
            if self._status not in (EngineStatus.SERVING, EngineStatus.APPLYING):
                raise RuntimeError(f"{self.spec.name} is {self._status.value} and cannot be probed: {self._fault}")
            if self._status is EngineStatus.SERVING:
                await self._stop()
            try:
                (first, *_) = await self._ranks("probe", list(token_ids))
            finally:
                await self._settle()
            assert isinstance(first, list)
            return [float(x) for x in first]

    async def loaded_sums(self) -> dict[str, npt.NDArray[np.float64]]:
        """Sums of all weights in place, through the kernels that sample; see `rollout.fingerprint`.

        Raises:
            RuntimeError: the engine samples or is fenced: only an update that was just applied is looked at.
        """
        async with self._updating:
            if self._status is not EngineStatus.APPLYING:
                raise RuntimeError(f"{self.spec.name} is {self._status.value}; weights are summed when just applied")
            found = await self._ranks("loaded_sums", pickle.dumps(self._counted()))
            return add_up(pickle.loads(one) for one in found if isinstance(one, bytes))

    def _counted(self) -> list[set[tuple[str, Box]]]:
        """What each rank answers for: a part that several hold is the first one's."""
        counted: list[set[tuple[str, Box]]] = []
        for wanted in self.wanted:
            own = {(name, box) for name, boxes in wanted.items() for box in boxes}
            counted.append(own.difference(*counted))
        return counted

    # -- what it is doing --------------------------------------------------------------------------

    def state(self) -> EngineState:
        """The state now."""
        fault = self._fault if self._status is EngineStatus.FENCED else ""
        return EngineState(
            status=self._status, weight_version=self._version, held=self._roll_call is not None, fault=fault
        )

    def stats(self) -> EngineStats:
        """The counters now."""
        return EngineStats(
            num_running=len(self._ledger),
            num_finished=self._ledger.num_finished,
            num_tokens=self._ledger.num_tokens,
            num_updates=self._num_updates,
            num_refused=self._num_refused,
            num_failed=self._num_failed,
        )

    async def drain_trace(self) -> Forwards:
        """Forwards of rank 0 since the last call, [N] of `rollout.engine_trace.FORWARD`."""
        (first, *_) = await self._ranks("drain_trace")
        assert isinstance(first, bytes)
        return decode_forwards(first)

    async def draft_stats(self) -> DraftStats:
        """What drafting did since the last call; all zeros in a stock engine."""
        (first, *_) = await self._ranks("draft_stats")
        assert isinstance(first, bytes)
        found: DraftStats = pickle.loads(first)
        return found

    async def kernel_classes(self) -> dict[str, str]:
        """Kernel of each linear layer of rank 0, by the layer's name."""
        (first, *_) = await self._ranks("kernel_classes")
        assert isinstance(first, list)
        return dict(first)

    async def _ranks(self, method: str, *args: object) -> list[object]:
        """Call a method of every rank's worker; returns their answers.

        Raises:
            RuntimeError: a rank raised, or the engine died; the message names the engine.
        """
        try:
            answers: list[tuple[object, str]] = await self._llm.collective_rpc("answer", args=(method, *args))
        except Exception as error:  # the border to vLLM's processes: what failed there arrives as a plain Exception
            raise RuntimeError(f"{self.spec.name}: {error or type(error).__name__}") from error
        if faults := [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(answers) if fault]:
            raise RuntimeError(f"{self.spec.name} could not {method.replace('_', ' ')}: {'; '.join(faults)}")
        return [answer for answer, _ in answers]
