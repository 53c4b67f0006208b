"""The engine's end of a publish, inside each vLLM worker: buckets in, loaded weights out.

The class takes the place of vLLM's `WeightTransferEngine` and uses layerwise reload, the only update path that works
for every format on every platform. The model goes back to checkpoint layout on the meta device. vLLM's own loaders take
unfused tensors in manifest order; this rank has received the boxes that they copy (`rollout.worker.loader_recording`).
Each layer is repacked into its old storage when its last tensor has arrived.

The order of one update: `expect` (the model stays unchanged), `start_weight_update`, `receive_weights`,
`finish_weight_update`. After a failure, `discard` leaves a complete model with mixed weights. The engine is then
fenced, and the next full publish starts from a clean state.

Invariant: no byte reaches a loader before it was verified against its bucket's trailer.
"""

import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import layerwise

from rollout.transports.base import AwaitedInbox, Channel, ColocatedChannel, GroupChannel
from rollout.transports.colocated import ColocatedInbox, map_shm
from rollout.transports.prefetch import Prefetch
from rollout.transports.shm import ShmInbox
from rollout.transports.streaming import GroupInbox
from rollout.weights.announcement import Announcement, HeldPlan
from rollout.weights.fingerprint_sums import Fingerprint
from rollout.weights.manifest import Box, Required, TensorSpec, WeightManifest
from rollout.worker import loader_replay, vllm_quirks
from rollout.worker.loaded_fingerprint import CountedLandings, LoadedSums
from rollout.worker.loader_recording import Landing, Recording, StandIns, required_boxes
from rollout.worker.received_pieces import ReceivedPieces

_logger = logging.getLogger(__name__)

BACKEND = "megatron_rl"
"""Name under which the receiver is registered with vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOrder:
    """One publish, for the ranks of an engine, which hold its plan."""

    announced: Announcement
    segments: Mapping[int, str]
    """Addresses of staged buckets by trainer rank, or of shared regions by engine rank if colocated."""
    timeout_s: float
    """Deadline of the whole publish."""
    with_sums: bool = True
    """Whether ranks sum what they load. Without sums the engine cannot serve these weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a rank reports of a publish that it has applied."""

    sums: Fingerprint
    """Taken while the publish was loaded; empty if it was announced without."""
    received_bytes: int
    """Counted by the transport."""


@dataclass
class ChannelInit(WeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's message with a channel for its workers; bytes, because its serialiser supports no other types."""

    channel: bytes
    """Pickled `Channel`."""


@dataclass
class UpdateInit(WeightTransferUpdateInfo):  # type: ignore[misc]
    """vLLM's message that starts an update in its workers."""

    weight_version: int


class BucketReceiver(WeightTransferEngine):  # type: ignore[misc]
    """Loads publishes into one worker's model."""

    init_info_cls = ChannelInit
    update_info_cls = UpdateInit
    supports_draft_weight_update = False

    _channel: Channel | None = None
    _stream: GroupInbox | None = None
    _order: UpdateOrder | None = None
    _manifest: WeightManifest | None = None
    """Of the expected publish."""
    _specs: tuple[TensorSpec, ...] = ()
    _recording = Recording((), frozenset())
    _counted = CountedLandings((), (), ())
    _sums: LoadedSums | None = None
    _received_bytes = 0
    _inbox: AwaitedInbox | None = None
    _feeding: AbstractContextManager[object] = nullcontext()
    """Context in which loaders copy received boxes instead of stand-ins."""

    @property
    def _rank(self) -> int:
        rank: int = get_tensor_model_parallel_rank()
        return rank

    def init_transfer_engine(self, init_info: ChannelInit) -> None:
        """Join a channel, after leaving the earlier one."""
        self.shutdown()
        channel: Channel = pickle.loads(init_info.channel)
        if isinstance(channel, GroupChannel):
            self._stream = GroupInbox(channel, engine_rank=self._rank)
        self._channel = channel

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._held = HeldPlan()

    def hold(self, announced: Announcement, manifest: WeightManifest) -> None:
        """Keep a manifest, of which later publishes differ in the version only."""
        self._held.keep(announced, manifest)

    def expect(self, order: UpdateOrder) -> None:
        """Open the inbox of a publish without touching the model; a streaming inbox starts to receive.

        Raises:
            RuntimeError: a staged file for this rank is missing, its shared region is corrupt, or this rank does not
                hold the plan.
        """
        if self._channel is None:
            raise RuntimeError(
                "there is no channel: init_transport comes before the first publish and after a failed one"
            )
        manifest = self._held.manifest(order.announced)
        self._order, self._manifest = order, manifest
        if isinstance(self._channel, ColocatedChannel):
            self._inbox = self._colocated_inbox(self._channel, order, manifest)
        elif self._stream is None:
            self._inbox = ShmInbox(manifest, order.segments, engine_rank=self._rank)
        else:
            self._stream.expect(manifest, timeout_s=order.timeout_s)
            required = [bucket for bucket in manifest.buckets if bucket.required_by(self._rank)]
            self._inbox = Prefetch(self._stream, required)

    def _colocated_inbox(
        self, channel: ColocatedChannel, order: UpdateOrder, manifest: WeightManifest
    ) -> ColocatedInbox:
        rank, shared_with = self._rank, channel.shared_with[self._rank]
        address = order.segments.get(rank)
        if address is None:
            raise RuntimeError(f"no trainer rank has filled a shared region for engine rank {rank}")
        if channel.memory == "shm":
            memory = map_shm(manifest, address, engine_rank=rank, shared_with=shared_with)
        else:
            from rollout.transports.cuda_ipc import map_cuda  # needs CUDA

            memory = map_cuda(address)
        return ColocatedInbox(manifest, memory, engine_rank=rank, shared_with=shared_with)

    def required(self, specs: Sequence[TensorSpec]) -> Required:
        """Boxes that this rank's loaders copy from a publish of these tensors; the model stays unchanged."""
        self._specs, self._recording = tuple(specs), StandIns(specs).record(self.model)
        modules = {landing.module for landing in self._recording.landings}
        if slow := sorted(modules - loader_replay.replayed(self._recording)):
            _logger.warning("%d of %d modules need vLLM's loaders: %s", len(slow), len(modules), ", ".join(slow[:5]))
        return required_boxes(self._recording.landings)

    def count(self, counted: Collection[tuple[str, Box]]) -> None:
        """Choose the tensors and boxes that this rank sums; call it after `required`."""
        self._counted = CountedLandings(self._recording.landings, self._specs, counted)

    def loaded_fingerprint(self) -> Fingerprint:
        """Fingerprint of the weights that the model holds now."""
        return LoadedSums(self.model, self._counted, self.model_config.dtype).fingerprint()

    def loaded(self) -> Loaded:
        """Report the publish that was applied, once."""
        sums, self._sums = self._sums, None
        return Loaded(sums={} if sums is None else sums.fingerprint(), received_bytes=self._received_bytes)

    def arrived(self) -> bool:
        """Whether verified buckets are there, so that the publish can begin to be applied.

        Raises:
            RuntimeError: a bucket is late, corrupt or of another publish, or no publish was expected.
        """
        if self._inbox is None:
            raise RuntimeError("no publish was announced to this rank")
        return self._inbox.arrived()

    def start_weight_update(self) -> None:
        """Put the model back into checkpoint layout on the meta device."""
        vllm_quirks.before_reload(self.model)
        layerwise.initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInit) -> None:
        """Load every tensor of the expected publish in manifest order."""
        order, manifest, inbox = self._order, self._manifest, self._inbox
        if order is None or manifest is None or inbox is None or manifest.weight_version != update_info.weight_version:
            raise RuntimeError(f"weight version {update_info.weight_version} was not announced to this rank")
        self._sums = LoadedSums(self.model, self._counted, self.model_config.dtype) if order.with_sums else None
        stand_ins = StandIns(manifest.tensors)
        received = ReceivedPieces(manifest, inbox, engine_rank=self._rank)
        self._feeding = stand_ins.feed(received)
        landings: dict[str, list[Landing]] = {}
        for landing in self._recording.landings:
            landings.setdefault(landing.module, []).append(landing)
        for step in loader_replay.steps(manifest.tensors, self._recording):
            if isinstance(step, str):
                loader_replay.load(self.model.get_submodule(step), landings[step], received)
                if self._sums is not None:
                    self._sums.add(step)
            else:
                with self._feeding:
                    self.model.load_weights(stand_ins.items(step))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Repack the remaining layers (padded tensors are copied only here) and restore the model's kernel tensors."""
        with self._feeding:
            layerwise.finalize_layerwise_reload(self.model, self.model_config)
        vllm_quirks.after_reload(self.model)
        self._received_bytes = 0 if self._inbox is None else self._inbox.received_bytes
        self._order = self._manifest = self._inbox = None
        self._feeding = nullcontext()

    @torch.no_grad()
    def discard(self) -> None:
        """Drop half-loaded layers after a failure, so that the next update starts from a clean state."""
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            info.loaded_weights = []
            info.load_numel = 0
        self._feeding = nullcontext()
        self._sums = None
        self._end_prefetch()
        self.finish_weight_update()

    def _end_prefetch(self) -> None:
        """End the thread that receives buckets, which holds one of them."""
        if isinstance(self._inbox, Prefetch):
            self._inbox.close()

    def shutdown(self) -> None:
        """Leave the channel; its senders notice the closed connection at once."""
        self._end_prefetch()
        if self._stream is not None:
            self._stream.close()
        self._channel = self._stream = self._order = self._manifest = self._inbox = None

    @staticmethod
    def trainer_send_weights(*args: object, **kwargs: object) -> None:
        """Required by vLLM before 0.32, and never called: trainer ranks have their own senders."""
        raise NotImplementedError("trainer ranks send through rollout.transports")
