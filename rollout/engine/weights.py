"""The weights of one engine: their version, their updates, and whether the engine may sample from them.

States (decision 41): `serving(v)` -> `paused` -> `applying(v + 1)` -> `serving(v + 1)`, or `fenced`. A new engine is
fenced at version -1 until publish 0. An engine that does not serve samples nothing and keeps its requests inside vLLM.
`EngineSpec.in_flight` decides what an update does to running requests. They continue with recomputed keys and values,
continue with the old ones, or finish first.

Versions are stamped here (decision 42): at each update, after the last output of the old weights has been counted,
every response records its number of tokens.

A manifest reaches the engine once, and its ranks once; later publishes of the same plan are announced
(`rollout.weights.announcement`).

Invariants: no token is sampled between the first applied byte of an update and `resume`; a fault before that byte
changes nothing.
"""

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from history.patience import answer_within
from rollout.built_model import BuiltModel
from rollout.engine.async_llm import LlmHandle
from rollout.engine.responses import ResponseLedger
from rollout.engine.spec import EngineSpec
from rollout.engine.state import EngineFencedError, EngineProof, EngineStatus, UpdateTimes, WeightsRefusedError
from rollout.transports.base import Channel, GroupChannel
from rollout.types import WeightVersion
from rollout.weights.announcement import Announcement, HeldPlan, SentPlan
from rollout.weights.checkpoint_tensors import check_plan, check_publish
from rollout.weights.fingerprint_sums import Fingerprint, Lenience, add_up, difference
from rollout.weights.manifest import Box, Required, TensorSpec, WeightManifest
from rollout.worker import vllm_compat
from rollout.worker.receiver import Loaded, UpdateOrder

ARRIVAL_POLL_S = 0.005
GRACE_S = 30.0
"""Extra time for a rank to report a late peer itself, before the engine reports the rank."""
_PARTS = frozenset[Literal["weights", "kv_cache"]](("weights", "kv_cache"))
"""Parts of an engine's device memory that sleep and wake."""
_ALL_RANKS = 0
"""Number of the ranks together, as a receiver of a plan: they begin and end with the engine."""


class EngineWeights:
    """The state of an engine's weights and its changes, one at a time."""

    def __init__(
        self,
        spec: EngineSpec,
        handle: LlmHandle,
        ledger: ResponseLedger,
        *,
        sync_vllm: Callable[[], Awaitable[None]],
        submit_again: Callable[[], Awaitable[None]],
    ) -> None:
        """Weights of an engine before its start: fenced, at version -1.

        Args:
            spec: of the engine.
            handle: its vLLM.
            ledger: its responses in flight, which record weight versions.
            sync_vllm: lets vLLM run if the engine may sample, and pauses it otherwise.
            submit_again: gives all responses without a token the current `salt`; vLLM is paused.
        """
        self.spec = spec
        self._handle = handle
        self._ledger = ledger
        self._sync_vllm = sync_vllm
        self._submit_again = submit_again
        self.status = EngineStatus.FENCED
        self.version = WeightVersion(-1)
        self.fault = "no weights have been published yet"
        self.num_updates = self.num_refused = self.num_failed = 0
        self._num_outdated = 0
        """How often weights have stopped serving."""
        self.required: list[Required] = []
        """The parts of a publish that each rank receives; known after the start."""
        self.built: BuiltModel | None = None
        """The model that vLLM has built; known after the start."""
        self._expected: tuple[TensorSpec, ...] = ()
        self._held = HeldPlan()
        self._of_ranks = SentPlan()
        self._checked: WeightManifest | None = None
        """A manifest of the plan that was checked last; later publishes of the plan fit, too."""
        self._channel: Channel | None = None
        self._asleep: set[Literal["weights", "kv_cache"]] = set()
        """Parts whose memory the engine has released."""
        self._updating = asyncio.Lock()
        """Held during each change, in the order of the calls. So an update that the controller has given up ends before
        the next one begins, which loads all weights again: the former may have read memory that was released. Ranks
        keep that order even if the engine itself has given up (`_apply`), because vLLM runs its calls one by one."""
        self.sums: Fingerprint = {}
        """Sums of the weights that the last update loaded; empty if it was announced without."""

    async def begin(self, expected: tuple[TensorSpec, ...]) -> None:
        """Set up after vLLM's start; `expected` are the tensors of a publish, empty if vLLM has loaded a directory."""
        if not expected:
            self.status, self.version, self.fault = EngineStatus.SERVING, WeightVersion(0), ""
            return
        self._expected = expected
        answers = await self._handle.ranks("required", pickle.dumps(expected))
        self.required = [pickle.loads(answer) for answer in answers if isinstance(answer, bytes)]
        (first, *_) = await self._handle.ranks("built_model")
        assert isinstance(first, bytes)
        self.built = pickle.loads(first)
        await self._handle.ranks("count", pickle.dumps(self._counted()))
        await self._handle.llm.pause_generation(mode="keep", clear_cache=False)

    @property
    def salt(self) -> str:
        """Salt that separates cached prefixes by weights; empty unless caches survive updates (`keep_kv`).

        It changes when an update pauses vLLM, because requests that come during the update are sampled from the new
        weights. The version changes too late for them.
        """
        return f"weights {self._num_outdated}" if self._keeps_kv else ""

    async def init_transport(self, channel: Channel) -> None:
        """Join the channel of future publishes, and leave an earlier channel.

        Raises:
            RuntimeError: the other end did not join.
        """
        async with self._updating:
            self._channel = None
            await self._handle.ranks("open_channel", pickle.dumps(channel))
            self._channel = channel

    def accept(self, announced: Announcement, manifest: WeightManifest | None = None) -> None:
        """Check an announced publish, by the manifest that came with it or by the one that the engine holds.

        Raises:
            WeightsRefusedError: as for `check` and `announced`.
        """
        if manifest is None:
            self.check(self.announced(announced))
            return
        self.check(manifest.of_version(announced.weight_version))
        self._held.keep(announced, manifest)

    def announced(self, announced: Announcement) -> WeightManifest:
        """The manifest of an announced publish.

        Raises:
            WeightsRefusedError: the engine does not hold its plan.
        """
        try:
            return self._held.manifest(announced)
        except RuntimeError as error:
            raise self._refusal(announced.weight_version, error) from error

    def check(self, manifest: WeightManifest) -> None:
        """Check a manifest; this is cheap, so every engine is asked before any weights are sent.

        A plan is checked once, because its parts never change.

        Raises:
            WeightsRefusedError: the manifest is of another run or format, stale or inconsistent, does not match the
                model's tensors, or lacks a part that a rank requires.
        """
        # a version that was applied and never served may be published again: another engine died before the probe
        unproven = self.status is EngineStatus.APPLYING
        try:
            check_publish(
                manifest,
                run_id=self.spec.run_id,
                format=self.spec.config.format,
                current=WeightVersion(self.version - unproven),
            )
            if self._checked is None or not manifest.follows_plan_of(self._checked):
                check_plan(manifest, self._expected)
                for rank, required in enumerate(self.required):
                    manifest.check_required(rank, required)
                self._checked = manifest
        except RuntimeError as error:
            raise self._refusal(manifest.weight_version, error) from error

    async def update(
        self, manifest: WeightManifest, segments: Mapping[int, str] | None = None, *, with_sums: bool = True
    ) -> UpdateTimes:
        """Apply one publish. Afterwards the engine is `applying`: `prove` it, then `resume()` or `fence()` it.

        Args:
            manifest: of the publish.
            segments: for staged transports, as in `UpdateOrder`.
            with_sums: as in `UpdateOrder`.

        Raises:
            WeightsRefusedError: no weight has changed, and the engine continues. A streaming channel is closed.
            EngineFencedError: the weights are mixed, and the engine is fenced. A streaming channel is closed.
        """
        timeout_s, started = self.spec.config.update_timeout_s, time.perf_counter()
        async with self._updating:
            self._check_awake("weights")
            try:
                self.check(manifest)
                order = UpdateOrder(
                    announced=self._of_ranks.announce(manifest),
                    segments=dict(segments or {}),
                    timeout_s=timeout_s,
                    with_sums=with_sums,
                )
                await self._announce(order, manifest)
            except WeightsRefusedError:
                await self._leave_stream()
                await self._sync_vllm()  # the engine may have been drained
                raise
            arrived = time.perf_counter()
            in_flight = len(self._ledger)
            num_discarded = await self._pause(keeps_kv=self._keeps_kv)
            paused = time.perf_counter()
            received_bytes = await self._apply(order)
            done = time.perf_counter()
        return UpdateTimes(
            arrive_s=arrived - started,
            pause_s=paused - arrived,
            apply_s=done - paused,
            num_in_flight=in_flight,
            num_recomputed_tokens=num_discarded,
            received_bytes=received_bytes,
        )

    async def sleep(self) -> None:
        """Release the memory of weights, keys and values (`engine.sleep_level`); responses in flight wait.

        An engine that sleeps stays as it is. vLLM 0.25 does not check it: it would release memory that is not mapped.
        The engine serves again after `wake` of both parts and an update, because its old weights are outdated.
        """
        async with self._updating:
            if self._asleep == _PARTS:
                return
            for part in sorted(self._asleep):  # vLLM releases all parts at once
                await self._allocate(part)
            await self._pause(keeps_kv=False)
            await self._handle.ranks("sleep", self.spec.config.sleep_level)
            self._asleep = set(_PARTS)
            self.status, self.version = EngineStatus.PAUSED, WeightVersion(-1)

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate memory again: weights before an update, keys and values before the probe after it.

        A part that is awake stays as it is; vLLM 0.25 would map it a second time.
        """
        async with self._updating:
            if part in self._asleep:
                await self._allocate(part)

    async def _allocate(self, part: Literal["weights", "kv_cache"]) -> None:
        """Call the ranks directly: vLLM's `wake_up` would schedule requests before the weights are verified."""
        await self._handle.ranks("wake_up", [part])
        self._asleep.remove(part)

    def _check_awake(self, *parts: str) -> None:
        if missing := self._asleep.intersection(parts):
            raise RuntimeError(f"{self.spec.name} sleeps; wake these parts first: {', '.join(sorted(missing))}")

    async def drain(self) -> None:
        """Begin no further response and wait until running responses are finished; an update follows."""
        async with self._updating:
            if self.status is EngineStatus.SERVING:
                await self._handle.llm.pause_generation(mode="wait", clear_cache=True)

    async def _announce(self, order: UpdateOrder, manifest: WeightManifest) -> None:
        """Wait for verified data: all of a staged publish, or the first bucket of a streamed publish."""
        try:
            if self._of_ranks.lacking((_ALL_RANKS,)):
                await self._handle.ranks("hold_manifest", pickle.dumps((order.announced, manifest)))
                self._of_ranks.given((_ALL_RANKS,))
            await self._handle.ranks("expect_weights", pickle.dumps(order))
            while not all(await self._handle.ranks("weights_arrived")):
                await asyncio.sleep(ARRIVAL_POLL_S)
        except RuntimeError as error:
            raise self._refusal(manifest.weight_version, error) from error

    def _refusal(self, version: WeightVersion, error: RuntimeError) -> WeightsRefusedError:
        self.num_refused += 1
        return WeightsRefusedError(f"{self.spec.name} refused weight version {version}: {error}")

    async def _leave_stream(self) -> None:
        """Close a streaming channel, whose senders would otherwise wait until their deadline."""
        if isinstance(self._channel, GroupChannel):
            self._channel = None
            await self._handle.ranks("close_channel")

    @property
    def _keeps_kv(self) -> bool:
        return self.spec.in_flight == "keep_kv"

    async def _pause(self, *, keeps_kv: bool) -> int:
        """Stop sampling; returns the number of tokens whose keys and values were discarded.

        Responses without a token are submitted again if keys and values are kept. All their tokens will be sampled from
        the new weights, but their requests would find the keys and values of the old ones.
        """
        await self._stop(keeps_kv=keeps_kv)
        await vllm_compat.drain(self._handle.llm)
        if self.status is EngineStatus.SERVING:
            self._ledger.stamp(self.version, lambda request: vllm_compat.num_emitted_tokens(self._handle.llm, request))
            self.status = EngineStatus.PAUSED
            self._num_outdated += 1
            if keeps_kv:
                await self._submit_again()
        if keeps_kv:
            return 0
        return sum(vllm_compat.num_context_tokens(self._handle.llm, request) for request in self._ledger.request_ids())

    async def _stop(self, *, keeps_kv: bool) -> None:
        await self._handle.llm.pause_generation(mode="keep", clear_cache=not keeps_kv)

    async def _apply(self, order: UpdateOrder) -> int:
        """Apply a publish; returns the bytes that the rank with the most received."""
        version = order.announced.weight_version
        self.status, self.sums = EngineStatus.APPLYING, {}
        try:
            applying = self._handle.ranks("apply_weights", version)
            answers = await answer_within(order.timeout_s + GRACE_S, applying)
        except (RuntimeError, TimeoutError) as error:
            self.num_failed += 1
            self._fence(f"weight version {version} failed: {str(error) or 'the ranks do not answer'}")
            if isinstance(error, RuntimeError):
                await self._leave_stream()
            raise EngineFencedError(f"{self.spec.name} is fenced: {self.fault}") from error
        loaded: list[Loaded] = [pickle.loads(answer) for answer in answers if isinstance(answer, bytes)]
        self.sums = add_up(rank.sums for rank in loaded)
        await vllm_compat.note_weight_version(self._handle.llm, version)
        self.num_updates += 1
        self.version = version
        return max((rank.received_bytes for rank in loaded), default=0)

    def _fence(self, fault: str) -> None:
        self.status, self.fault = EngineStatus.FENCED, fault

    async def fence(self, fault: str) -> None:
        """Forbid sampling until the next full publish, for an external reason such as a failed probe."""
        async with self._updating:
            if self.status is EngineStatus.SERVING:
                await self._pause(keeps_kv=False)
            self._fence(fault)

    async def forget(self) -> None:
        """Be fenced at version -1, so that a publish of any version is accepted as publish 0 was; drop all caches."""
        async with self._updating:
            if not self._asleep:  # else `sleep` has dropped them
                await self._pause(keeps_kv=False)
            self.version = WeightVersion(-1)
            self._fence("the trainer begins again from its checkpoint")

    async def resume(self) -> None:
        """Serve the weights that the last update applied.

        Raises:
            RuntimeError: no finished update is there to serve, or the engine sleeps.
        """
        async with self._updating:
            self._check_awake("weights", "kv_cache")
            if self.status is not EngineStatus.APPLYING:
                raise RuntimeError(f"{self.spec.name} is {self.status.value} and has no update to serve: {self.fault}")
            self.status, self.fault = EngineStatus.SERVING, ""
            await self._sync_vllm()

    async def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities at temperature 1 of each prompt token after the first, [len(token_ids) - 1].

        After an update the prompt also sets the scales of keys and values in FP8 (`engine.kv_format`).

        Raises:
            RuntimeError: the engine is fenced, or sleeps.
        """
        async with self._updating:
            self._check_awake("weights", "kv_cache")
            if self.status not in (EngineStatus.SERVING, EngineStatus.APPLYING):
                raise RuntimeError(f"{self.spec.name} is {self.status.value} and cannot be probed: {self.fault}")
            if self.status is EngineStatus.SERVING:
                await self._stop(keeps_kv=self._keeps_kv)
            try:
                if self.status is EngineStatus.APPLYING and self.spec.config.kv_format == "fp8":
                    await self._handle.ranks("set_kv_scales", list(token_ids))
                (first, *_) = await self._handle.ranks("probe", list(token_ids))
            finally:
                await self._sync_vllm()
            assert isinstance(first, list)
            return [float(x) for x in first]

    async def loaded_fingerprint(self) -> dict[str, npt.NDArray[np.float64]]:
        """Sums of the weights that the model holds now: those of `sums`, from a second pass over the weights.

        Raises:
            RuntimeError: the engine is not `applying`: only an update that was just applied is summed.
        """
        async with self._updating:
            self._check_applying()
            answers = await self._handle.ranks("loaded_fingerprint")
            return add_up(pickle.loads(answer) for answer in answers if isinstance(answer, bytes))

    async def prove(self, expected: Fingerprint, lenience: Lenience, token_ids: list[int]) -> EngineProof:
        """Compare the sums of the last update with the trainer's, and run the probe.

        The engine compares (`rollout.weights.fingerprint_sums.difference`), because the sums of a large model are many
        megabytes.

        Raises:
            RuntimeError: the engine is not `applying`, or sleeps.
        """
        self._check_applying()
        gap, where = difference(self.sums, expected, leniency=lenience.of)
        return EngineProof(weight_gap=gap, where=where, logprobs=await self.probe(token_ids))

    def _check_applying(self) -> None:
        if self.status is not EngineStatus.APPLYING:
            raise RuntimeError(f"{self.spec.name} is {self.status.value}; weights are summed only after an update")

    def _counted(self) -> list[set[tuple[str, Box]]]:
        """The parts that each rank sums: a part of several ranks belongs to the first of them."""
        counted: list[set[tuple[str, Box]]] = []
        for required in self.required:
            parts = {(name, box) for name, boxes in required.items() for box in boxes}
            counted.append(parts.difference(*counted))
        return counted
