"""Executes a reshard plan on one trainer rank: parameters in, filled buckets out.

Also gives back what the engine will compute with: `published_values` are the parameters after a round
trip through the wire format, the other side of every publish's probe.

Scales are fresh at every publish. Where a block of weights that share a scale lies on several ranks (rows of
column-cut matrices, blocks across a border) all trainer ranks of a tensor-parallel group enter one small all-reduce
(`refresh_scales`); everything after that is local, and a matrix is looked through for its scales where it is quantised.

Parameters that are FP8 themselves (`fp8_parameters`) are sent unchanged in `fp8_block`, codes and scales, where their
blocks agree (`fp8_passthrough`). Elsewhere, and in any other format, they are decoded first and quantised again.

Matrices are worked on in strips of rows: what is needed meanwhile in higher precision stays small beside a layer.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_rl.quantization import fp8_parameters
from megatron_rl.quantization.backends import Quantizer, choose_backend
from megatron_rl.quantization.formats import CODE_FORMATS
from megatron_rl.quantization.fp8 import copied_into
from megatron_rl.weights.fp8_passthrough import blocks_agree
from megatron_rl.weights.quantization_error import CodeWatch, sampled_rows
from megatron_rl.weights.reshard_plan import PieceSource, ReshardPlan, Role
from megatron_rl.weights.shards import Shard
from rollout.transports.base import Sender
from rollout.types import WeightVersion
from rollout.weights.fingerprint import column_signs, fold, multiply, of_box, through_expert
from rollout.weights.fingerprint_sums import Fingerprint
from rollout.weights.manifest import Box, Bucket

STRIP, DEVICE_STRIP = 1 << 18, 1 << 23
"""Weights that are worked on at a time, at most about: what a core's cache holds; on a device, what keeps it busy."""


class WeightPacker:
    """One rank's parameters, seen as boxes of Hugging Face tensors."""

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        rank: int,
        held: Sequence[Shard],
        parameters: Mapping[str, torch.nn.Parameter],
        tensor_group: dist.ProcessGroup | None,
        answers: Callable[[Shard], bool],
    ) -> None:
        """A packer that can pack what the plan has this rank send.

        Args:
            plan: of every publish.
            rank: of this trainer rank.
            held: all shards of this rank.
            parameters: of this rank, by name.
            tensor_group: None without tensor parallelism.
            answers: whether this rank, of all replicas, answers for a shard's sums.
        """
        self._plan = plan
        self._own = [
            (bucket, sources)
            for bucket, sources in zip(plan.buckets, plan.sources, strict=True)
            if bucket.source_rank == rank
        ]
        self._held = tuple(held)
        self._answers = answers
        self._parameters = parameters
        self._tensor_group = tensor_group
        self._layout = plan.format.layout
        self._quantized: dict[str, list[Shard]] = {}
        """By matrix."""
        for shard in held:
            if plan.quantizes(shard):
                self._quantized.setdefault(shard.hf_name, []).append(shard)
        in_8_bits = [shard for shards in self._quantized.values() for shard in shards]
        self._quantizer = self._choose_quantizer(in_8_bits)
        self._as_is = frozenset(one for one in in_8_bits if plan.format.name == "fp8_block" and self._agrees(one))
        """Boxes whose codes and scales are those of an FP8 parameter."""
        self._shared = [name for name in plan.shared if name in self._quantized]
        self.watch = CodeWatch()
        """What 8 bits cost the weights of the last `send`."""
        self.pack_s = self.send_s = 0.0
        """What the last `send` took."""
        self._factors: dict[str, torch.Tensor] = {}
        self._scales: dict[str, torch.Tensor] = {}

    def _choose_quantizer(self, shards: Sequence[Shard]) -> Quantizer | None:
        """The format with the backend for the matrices that this rank quantises; None if it quantises nothing."""
        format = CODE_FORMATS.get(self._plan.format.name)
        if format is None or not shards:
            return None
        matrices = [self._parameters[shard.megatron_name] for shard in shards]
        dtypes = {matrix.dtype for matrix in matrices}
        return Quantizer(format=format, backend=choose_backend(format, matrices[0].device, dtypes))

    @torch.no_grad()
    def refresh_scales(self) -> None:
        """Forget scales of earlier parameters, and agree on those that ranks share; a collective.

        Those that only this rank's parameters decide are computed when they are first asked for: a matrix that has
        just been read to find them is quantised from the cache.

        Raises:
            ValueError: a weight is not finite; the message names its tensor. So does whatever asks for a scale.
        """
        self._factors, self._scales = {}, {}
        if not self._shared or self._tensor_group is None:
            return
        amaxes = [self._amax(name) for name in self._shared]
        joined = torch.cat([amax.view(-1) for amax in amaxes])
        dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=self._tensor_group)
        parts = torch.split(joined, [amax.numel() for amax in amaxes])
        for name, amax, part in zip(self._shared, amaxes, parts, strict=True):
            self._refresh(name, part.view_as(amax))

    def _amax(self, name: str) -> torch.Tensor:
        """Largest magnitude of every block of a matrix as far as this rank holds it, float32 [P, Q]."""
        assert self._quantizer is not None and self._layout is not None, "only 8-bit formats have scales"
        held = self._quantized[name]
        device = self._parameters[held[0].megatron_name].device
        whole = torch.zeros(self._layout.grid(held[0].hf_full_shape), device=device)
        for shard in held:
            if shard not in self._as_is:
                for strip in self._strips(shard, _whole(shard)):
                    found = self._quantizer.amax(self._values(shard, strip), strip.start)
                    blocks = self._layout.touched(strip.start, strip.shape)
                    whole[blocks] = torch.maximum(whole[blocks], found)
        return whole

    def _refresh(self, name: str, amax: torch.Tensor) -> None:
        """Make what codes and scales of a matrix need."""
        assert self._quantizer is not None and self._layout is not None, "only 8-bit formats have scales"
        with _named(name):
            self._factors[name] = self._quantizer.factors(amax)
        self._scales[name] = self._quantizer.scales(self._factors[name])
        for shard in self._quantized[name]:
            if shard in self._as_is:
                own, place = self._blocks(shard), shard.megatron_slices
                with _named(name):
                    own.check(place)
                self._scales[name][self._layout.touched(shard.hf_start, shard.shape)] = own.scales(place)

    def _factors_of(self, name: str) -> torch.Tensor:
        """Of every block of a matrix, float32 [P, Q]; of blocks of which this rank holds nothing they mean nothing."""
        if name not in self._factors:
            self._refresh(name, self._amax(name))
        return self._factors[name]

    def _scales_of(self, name: str) -> torch.Tensor:
        """What travels beside the codes, likewise."""
        self._factors_of(name)
        return self._scales[name]

    @torch.no_grad()
    def send(self, sender: Sender, weight_version: WeightVersion) -> str:
        """Fill and hand over this rank's buckets; returns what `Sender.finish` returns. After `refresh_scales`.

        Raises:
            ValueError: a weight is not finite; nothing of its bucket has been handed over.
        """
        self.watch.begin()
        sender.open(weight_version, [bucket for bucket, _ in self._own])
        self.pack_s = self.send_s = 0.0
        for bucket, sources in self._own:
            started = time.perf_counter()
            self._fill(sender.buffer(bucket.index), bucket, sources)
            filled = time.perf_counter()
            sender.commit(bucket.index)
            self.pack_s += filled - started
            self.send_s += time.perf_counter() - filled
        started = time.perf_counter()
        path = sender.finish()
        self.send_s += time.perf_counter() - started
        return path

    def _fill(self, buffer: torch.Tensor, bucket: Bucket, sources: tuple[PieceSource, ...]) -> None:
        end = 0
        for piece, source in zip(bucket.pieces, sources, strict=True):
            buffer[end : piece.offset] = 0  # equal weights make equal buckets
            box, end = piece.box.in_matrix, piece.offset
            for strip in [box] if source.role is Role.SCALES else self._strips(source.shard, box):
                end += self._encode(source, strip, buffer[end:])
            if source.role is Role.CODES:
                self._look_at(buffer[piece.offset : end], source.shard, box)
        buffer[end : bucket.payload_bytes] = 0

    def _encode(self, source: PieceSource, box: Box, room: torch.Tensor) -> int:
        """Write what travels of a box to the beginning of `room`; how many bytes that are."""
        match source.role:
            case Role.VALUES:
                content = self._values(source.shard, box).to(torch.bfloat16)
            case Role.CODES:
                assert self._layout is not None, "only 8-bit formats have codes"
                codes = room[: math.prod(box.shape)].view(getattr(torch, self._layout.dtype)).view(box.shape)
                self._codes(source.shard, box, codes)
                return codes.numel()
            case Role.SCALES:
                content = self._scales_of(source.shard.hf_name)[box.slices((0, 0))]
        content = content.contiguous().view(-1).view(torch.uint8)
        room[: content.numel()].copy_(content)
        return content.numel()

    def _strips(self, shard: Shard, box: Box) -> Iterator[Box]:
        """A box cut into some rows each, between blocks that share a scale."""
        is_on_device = self._parameters[shard.megatron_name].device.type == "cuda"
        most = DEVICE_STRIP if is_on_device else STRIP
        return strips(box, most=most, multiple=1 if self._layout is None else self._layout.block[0])

    def _look_at(self, codes: torch.Tensor, shard: Shard, box: Box) -> None:
        """`codes` are the bytes of a piece."""
        assert self._layout is not None, "only 8-bit formats have codes"
        rows = sampled_rows(box)
        some = codes[: rows.size].view(getattr(torch, self._layout.dtype)).view(rows.shape)
        values = self._decoded(some, shard, rows)
        is_fp8 = fp8_parameters.is_fp8_parameter(self._parameters[shard.megatron_name])
        self.watch.see(
            shard.hf_name,
            box,
            self._values(shard, rows),
            some,
            values,
            as_is=shard in self._as_is if is_fp8 else None,
        )

    @torch.no_grad()
    def published_values(self, megatron_name: str) -> torch.Tensor:
        """One parameter of this rank as the engines hold it, in its own dtype. After `send`."""
        parameter = self._parameters[megatron_name]
        held = [shard for shard in self._held if shard.megatron_name == megatron_name]
        if fp8_parameters.is_fp8_parameter(parameter):
            published = fp8_parameters.decoded(parameter)
        elif sum(math.prod(shard.shape) for shard in held) == parameter.numel():
            published = torch.empty_like(parameter)
        else:  # what is padding stays
            published = parameter.detach().clone()
        for shard in held:
            for strip in self._strips(shard, _whole(shard)):
                published[_local(shard, strip)].copy_(self._round_trip(shard, strip))
        return published

    @torch.no_grad()
    def published_fingerprint(self) -> Fingerprint:
        """Sums (`rollout.weights.fingerprint`) of what this rank owns, as published. After `send`.

        From boxes as the model holds them, not from pieces as they were sent.
        """
        found: dict[str, npt.NDArray[np.float64]] = {}
        experts: dict[str, dict[str, Shard]] = {}
        for shard in self._held:
            if shard.of_expert and shard.owned and self._answers(shard):
                expert, _, leaf = shard.hf_name.removesuffix("_proj.weight").rpartition(".")
                experts.setdefault(expert, {})[leaf] = shard
            elif shard.owned and self._answers(shard):
                name, sums = shard.hf_name, self._sums(shard)
                found[name] = found[name] + sums if name in found else sums
        for parts in experts.values():
            matrices = (self._round_trip(one, _whole(one)) for one in (parts[leaf] for leaf in ("gate", "up", "down")))
            made = through_expert(*(matrix.float() for matrix in matrices))
            last = parts["down"]
            found[last.hf_name] = fold(made, _whole(last), last.hf_full_shape)
        return found

    def _sums(self, shard: Shard) -> npt.NDArray[np.float64]:
        whole, shape = _whole(shard), shard.hf_full_shape
        if len(shape) == 1:
            return of_box(self._round_trip(shard, whole), whole, shape)
        products = [
            multiply(self._round_trip(shard, strip), column_signs(strip, shape)) for strip in self._strips(shard, whole)
        ]
        return fold(torch.cat(products, dim=1), whole, shape)

    def _round_trip(self, shard: Shard, box: Box) -> torch.Tensor:
        if self._quantizer is None or self._layout is None or not self._plan.quantizes(shard):
            return self._values(shard, box).to(torch.bfloat16)
        return self._decoded(self._codes(shard, box), shard, box)

    def _decoded(self, codes: torch.Tensor, shard: Shard, box: Box) -> torch.Tensor:
        assert self._quantizer is not None and self._layout is not None, "only 8-bit formats have codes"
        scales = self._scales_of(shard.hf_name)[self._layout.touched(box.start, box.shape)]
        return self._quantizer.values(codes, scales, box.start)

    def _codes(self, shard: Shard, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """In `out` if there is one."""
        assert self._quantizer is not None and self._layout is not None, "only 8-bit formats have codes"
        if shard in self._as_is:
            return copied_into(self._blocks(shard).codes[_local(shard, box)], out)
        factors = self._factors_of(shard.hf_name)[self._layout.touched(box.start, box.shape)]
        return self._quantizer.codes(self._values(shard, box), factors, box.start, out)

    def _values(self, shard: Shard, box: Box) -> torch.Tensor:
        return fp8_parameters.values(self._parameters[shard.megatron_name], _local(shard, box))

    def _agrees(self, shard: Shard) -> bool:
        parameter = self._parameters[shard.megatron_name]
        return fp8_parameters.is_fp8_parameter(parameter) and blocks_agree(shard, tuple(parameter.shape))

    def _blocks(self, shard: Shard) -> fp8_parameters.Blocks:
        parameter = self._parameters[shard.megatron_name]
        assert fp8_parameters.is_fp8_parameter(parameter), "only FP8 parameters have blocks"
        return fp8_parameters.Blocks.of(parameter)


def strips(box: Box, *, most: int, multiple: int) -> Iterator[Box]:
    """A box from top to bottom in boxes of whole rows with at most about `most` elements.

    Each ends at a multiple of so many rows of the tensor, or where the box ends.
    """
    height = max(most // max(math.prod(box.shape[1:]), 1) // multiple, 1) * multiple
    first, end = box.start[0], box.start[0] + box.shape[0]
    while first < end:
        stop = min((first + height) // multiple * multiple, end)
        yield Box(start=(first, *box.start[1:]), shape=(stop - first, *box.shape[1:]))
        first = stop


def _whole(shard: Shard) -> Box:
    return Box(start=shard.hf_start, shape=shard.shape)


def _local(shard: Shard, box: Box) -> tuple[slice, ...]:
    """A part of the shard's box as an index into the parameter that holds it."""
    origin = tuple(hf - own for hf, own in zip(shard.hf_start, shard.megatron_start, strict=True))
    return box.slices(origin)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say whose weights cannot be published."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}; the policy has diverged and is not published") from None
