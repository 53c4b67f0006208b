"""Executes a reshard plan on one trainer rank: parameters in, filled buckets out.

Also gives back what the engine will compute with: `published_values` are the parameters after a round
trip through the wire format, the other side of every publish's probe.

Scales are fresh at every publish. Column-cut matrices need the maximum over the whole row, so all
trainer ranks of a tensor-parallel group enter one small all-reduce (`refresh_scales`); everything after
that is local.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_rl.weights.names import Placement
from megatron_rl.weights.quantize import CHANNEL_FORMATS, channel_values, row_amax
from megatron_rl.weights.reshard import QUANTIZED_KINDS, PieceSource, ReshardPlan, Role
from rollout.transports.base import Sender
from rollout.types import WeightVersion
from rollout.wire import Bucket, Piece

Box = tuple[str, tuple[int, ...]]
"""Hugging Face name and first index: names a placement on one rank."""


class WeightPacker:
    """One rank's parameters, seen as boxes of Hugging Face tensors."""

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        rank: int,
        held: Sequence[Placement],
        parameters: Mapping[str, torch.nn.Parameter],
        tensor_group: dist.ProcessGroup | None,
    ) -> None:
        """`held` are all placements of this rank; `tensor_group` is None without tensor parallelism."""
        self._plan = plan
        self._own = [
            (bucket, sources)
            for bucket, sources in zip(plan.buckets, plan.sources, strict=True)
            if bucket.source_rank == rank
        ]
        self._held = tuple(held)
        self._parameters = parameters
        self._tensor_group = tensor_group
        self._format = CHANNEL_FORMATS.get(plan.format)
        self._amax: dict[Box, torch.Tensor] = {}
        self._scales: dict[Box, torch.Tensor] = {}

    @torch.no_grad()
    def refresh_scales(self) -> None:
        """Compute the scales of every quantised box from the current parameters; a collective.

        Raises:
            ValueError: a weight is not finite; the message names its tensor.
        """
        self._scales = {}
        if self._format is None:
            return
        quantized = [placement for placement in self._held if placement.kind in QUANTIZED_KINDS]
        amax = {_box(placement): row_amax(self._values(placement)) for placement in quantized}
        cut = [_box(placement) for placement in quantized if placement.shape[1] < placement.hf_full_shape[1]]
        if cut and self._tensor_group is not None:
            joined = torch.cat([amax[box] for box in cut])
            dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=self._tensor_group)
            amax.update(zip(cut, torch.split(joined, [len(amax[box]) for box in cut]), strict=True))
        self._amax = amax
        for box, rows in amax.items():
            try:
                self._scales[box] = self._format.scales(rows)
            except ValueError as error:
                raise ValueError(f"{box[0]}: {error}; the policy has diverged and is not published") from None

    @torch.no_grad()
    def send(self, sender: Sender, weight_version: WeightVersion) -> str:
        """Fill and hand over this rank's buckets; returns what `Sender.finish` returns. Needs fresh scales."""
        sender.open(weight_version, [bucket for bucket, _ in self._own])
        for bucket, sources in self._own:
            self._fill(sender.buffer(bucket.index), bucket, sources)
            sender.commit(bucket.index)
        return sender.finish()

    def _fill(self, buffer: memoryview, bucket: Bucket, sources: tuple[PieceSource, ...]) -> None:
        for piece, source in zip(bucket.pieces, sources, strict=True):
            _write(buffer, piece, self._encoded(source))

    def _encoded(self, source: PieceSource) -> torch.Tensor:
        match source.role:
            case Role.VALUES:
                return self._values(source.placement).to(torch.bfloat16)
            case Role.CODES:
                return self._codes(source.placement)
            case Role.SCALES:
                return self._scales[_box(source.placement)]

    @torch.no_grad()
    def published_values(self, megatron_name: str) -> torch.Tensor:
        """One parameter of this rank as the engines hold it, in its own dtype. Needs fresh scales."""
        parameter = self._parameters[megatron_name]
        published = parameter.detach().clone()
        for placement in self._held:
            if placement.megatron_name == megatron_name:
                published[placement.megatron_slices] = self._round_trip(placement).to(published.dtype)
        return published

    def _round_trip(self, placement: Placement) -> torch.Tensor:
        if self._format is None or placement.kind not in QUANTIZED_KINDS:
            return self._values(placement).to(torch.bfloat16)
        return channel_values(self._codes(placement), self._scales[_box(placement)])

    def _codes(self, placement: Placement) -> torch.Tensor:
        assert self._format is not None, "only 8-bit formats have codes"
        return self._format.codes(self._values(placement), self._amax[_box(placement)])

    def _values(self, placement: Placement) -> torch.Tensor:
        return self._parameters[placement.megatron_name].detach()[placement.megatron_slices]


def _box(placement: Placement) -> Box:
    return placement.hf_name, placement.hf_start


def _write(buffer: memoryview, piece: Piece, tensor: torch.Tensor) -> None:
    source = tensor.contiguous().view(-1).view(torch.uint8)
    target = torch.frombuffer(buffer, dtype=torch.uint8, count=len(source), offset=piece.offset)
    target.copy_(source)
