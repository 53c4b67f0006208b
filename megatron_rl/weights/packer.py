"""Executes a reshard plan on one trainer rank: parameters in, filled buckets out.

`published_values` returns the parameters after a round trip through the wire format, which are the weights that the
engines compute with. `published_fingerprint` has the sums by which every publish compares both sides
(`rollout.weights.fingerprint`). Their products are taken from codes and values just after they are written to a
bucket, while they are in a cache, so the proof does not read the weights again.

Scales are computed anew at every publish. A block of weights that share a scale may lie on several ranks (rows of
column-cut matrices, blocks across a border). For such blocks all trainer ranks of a tensor-parallel group enter one
small all-reduce (`refresh_scales`). Everything after it is local: a matrix is read for its scales just before it is
quantised.

FP8 parameters (`fp8_parameters`) are sent unchanged in `fp8_block`, codes and scales, where their blocks agree with the
engines' (`fp8_passthrough`). Elsewhere, and in all other formats, they are decoded first and quantised again.

Matrices are processed in boxes of some rows each, so temporary copies in higher precision stay small beside a layer.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_rl.quantization import fp8_parameters
from megatron_rl.quantization.backends import Quantizer, choose_backend
from megatron_rl.quantization.formats import CODE_FORMATS
from megatron_rl.quantization.fp8 import copied_into
from megatron_rl.weights.fp8_passthrough import blocks_agree
from megatron_rl.weights.packed_sums import PackedSums
from megatron_rl.weights.quantization_error import CodeWatch, sampled_rows
from megatron_rl.weights.reshard_plan import PlannedPiece, ReshardPlan, Role
from megatron_rl.weights.shards import Shard
from megatron_rl.weights.stream_times import StreamTimes
from rollout import progress
from rollout.transports.base import Sender
from rollout.types import WeightVersion
from rollout.weights.fingerprint import fold, products_of, through_expert
from rollout.weights.fingerprint_sums import Fingerprint
from rollout.weights.format import FUSED
from rollout.weights.manifest import Box, Bucket

QKV = FUSED[0]

CPU_BOX_SIZE, DEVICE_BOX_SIZE = 1 << 18, 1 << 23
"""Largest number of weights, roughly, processed at a time: what a core's cache holds, and what keeps a GPU busy."""


def _fused_with(name: str) -> tuple[str, ...]:
    """The matrices that Megatron holds in one parameter with a query, key or value matrix; else none."""
    module, _, part = name.removesuffix(".weight").rpartition(".")
    return tuple(f"{module}.{each}.weight" for each in QKV) if part in QKV else ()


class WeightPacker:
    """Fills the buckets that one trainer rank sends, from its parameters."""

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        rank: int,
        held: Sequence[Shard],
        parameters: Mapping[str, torch.nn.Parameter],
        tensor_group: dist.ProcessGroup | None,
        fingerprints: Callable[[Shard], bool],
    ) -> None:
        """Make a packer for every publish of a run.

        Args:
            plan: the plan of every publish.
            rank: number of this trainer rank.
            held: all shards of this rank.
            parameters: this rank's parameters by Megatron's name.
            tensor_group: process group of the tensor-parallel ranks; None without tensor parallelism.
            fingerprints: whether this rank's fingerprint includes a shard of an expert; exactly one replica's includes
                each. Of other tensors a rank's fingerprint includes what it sends.
        """
        self._plan = plan
        self._buckets = [
            (bucket, pieces)
            for bucket, pieces in zip(plan.buckets, plan.pieces, strict=True)
            if bucket.source_rank == rank
        ]
        self._held = tuple(held)
        self._fingerprints = fingerprints
        self._parameters = parameters
        self._tensor_group = tensor_group
        self._layout = plan.format.layout
        self._quantized: dict[str, list[Shard]] = {}
        """Shards that travel as codes, by matrix."""
        for shard in held:
            if plan.quantizes(shard):
                self._quantized.setdefault(shard.hf_name, []).append(shard)
        in_8_bits = [shard for shards in self._quantized.values() for shard in shards]
        self._quantizer = self._choose_quantizer(in_8_bits)
        self._as_is = frozenset(
            shard for shard in in_8_bits if plan.format.name == "fp8_block" and self._has_equal_blocks(shard)
        )
        """Shards sent with the codes and scales of their FP8 parameter."""
        beside = {name for held_name in self._quantized for name in _fused_with(held_name)}
        self._shared = [name for name in plan.shared if name in self._quantized or name in beside]
        """Matrices whose scales the tensor-parallel ranks agree on, the same on all of them: ranks that share a
        key/value head may hold rows of its query alone."""
        self._shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
        self.watch = CodeWatch()
        """Quantisation error of the last `send`."""
        self.pack_s = self.send_s = self.sums_s = 0.0
        """Seconds that the last `send` took to fill and to hand over buckets, and for sums while it filled them. Those
        of a device include its kernels."""
        self._times = self._new_times()
        self._sums = PackedSums()
        self._factors: dict[str, torch.Tensor] = {}
        self._scales: dict[str, torch.Tensor] = {}

    def _choose_quantizer(self, shards: Sequence[Shard]) -> Quantizer | None:
        """The format with the backend for the matrices that this rank quantises; None if it has none."""
        format = CODE_FORMATS.get(self._plan.format.name)
        if format is None or not shards:
            return None
        matrices = [self._parameters[shard.megatron_name] for shard in shards]
        dtypes = {matrix.dtype for matrix in matrices}
        return Quantizer(format=format, backend=choose_backend(format, matrices[0].device, dtypes))

    @torch.no_grad()
    def refresh_scales(self) -> None:
        """Drop the scales of earlier parameters, and reduce the scales that ranks share; a collective.

        Scales that depend on this rank's parameters alone are computed at their first use, so that the matrix is
        still in the cache when it is quantised.

        Raises:
            ValueError: a weight is not finite; the message names its tensor. Every method that needs a scale raises it.
        """
        self._factors, self._scales = {}, {}
        if not self._shared or self._tensor_group is None:
            return
        amaxes = [self._amax(name) for name in self._shared]
        joined = torch.cat([amax.view(-1) for amax in amaxes])
        dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=self._tensor_group)
        reduced = torch.split(joined, [amax.numel() for amax in amaxes])
        for name, local, amax in zip(self._shared, amaxes, reduced, strict=True):
            if name in self._quantized:
                self._refresh(name, amax.view_as(local))

    def _amax(self, name: str) -> torch.Tensor:
        """Largest magnitude of every block of a matrix over the weights that this rank holds, float32 [P, Q].

        Zeros if it holds none.
        """
        assert self._quantizer is not None and self._layout is not None, "only 8-bit formats have scales"
        held = self._quantized.get(name, [])
        shape = held[0].hf_full_shape if held else self._shapes[name]
        whole = torch.zeros(self._layout.grid(shape), device=next(iter(self._parameters.values())).device)
        for shard in held:
            if shard not in self._as_is:
                for box in self._row_boxes(shard, _whole(shard)):
                    amax = self._quantizer.amax(self._values(shard, box), box.start)
                    blocks = self._layout.touched(box.start, box.shape)
                    whole[blocks] = torch.maximum(whole[blocks], amax)
        return whole

    def _refresh(self, name: str, amax: torch.Tensor) -> None:
        """Compute a matrix's factors and scales from its largest magnitudes, float32 [P, Q]."""
        assert self._quantizer is not None and self._layout is not None, "only 8-bit formats have scales"
        with _named(name):
            self._factors[name] = self._quantizer.factors(amax)
        self._scales[name] = self._quantizer.scales(self._factors[name])
        for shard in self._quantized[name]:
            if shard in self._as_is:
                blocks, slices = self._blocks(shard), shard.megatron_slices
                with _named(name):
                    blocks.check(slices)
                self._scales[name][self._layout.touched(shard.hf_start, shard.shape)] = blocks.scales(slices)

    def _factors_of(self, name: str) -> torch.Tensor:
        """Factor of every block of a matrix, float32 [P, Q]; undefined for blocks that this rank holds nothing of."""
        if name not in self._factors:
            self._refresh(name, self._amax(name))
        return self._factors[name]

    def _scales_of(self, name: str) -> torch.Tensor:
        """Scales that travel with the codes, float32 [P, Q]; undefined likewise."""
        self._factors_of(name)
        return self._scales[name]

    @torch.no_grad()
    def send(self, sender: Sender, weight_version: WeightVersion, *, with_sums: bool = True) -> str:
        """Fill and hand over this rank's buckets, after `refresh_scales`; returns the result of `Sender.finish`.

        Without sums there is no `published_fingerprint`, so no engine can serve what was sent.

        Raises:
            ValueError: a weight is not finite; its bucket has not been handed over.
        """
        self.watch.begin(weight_version)
        self._sums.begin(with_sums)
        sender.open(weight_version, [bucket for bucket, _ in self._buckets])
        self._times, started = self._new_times(), time.perf_counter()
        for bucket, pieces in self._buckets:
            progress.mark(f"fill bucket {bucket.index}")
            with self._times.measure("pack"):
                self._fill(sender.buffer(bucket.index), bucket, pieces)
            progress.mark(f"hand over bucket {bucket.index}", kind="handover")
            sender.commit(bucket.index)  # waits for the bucket's kernels, because it needs the checksum
        progress.mark("hand over the last buckets", kind="handover")
        path = sender.finish()
        self._sums.end()
        progress.mark("all buckets are handed over")
        self.pack_s, self.sums_s = self._times.seconds("pack"), self._times.seconds("sums")
        self.send_s = time.perf_counter() - started - self.pack_s
        return path

    def _new_times(self) -> StreamTimes:
        return StreamTimes(on_device=any(one.device.type == "cuda" for one in self._parameters.values()))

    def _fill(self, buffer: torch.Tensor, bucket: Bucket, planned: tuple[PlannedPiece, ...]) -> None:
        end = 0
        for piece, source in zip(bucket.pieces, planned, strict=True):
            buffer[end : piece.offset] = 0  # so equal weights give equal bytes
            whole, end = piece.box.in_matrix, piece.offset
            for box in [whole] if source.role is Role.SCALES else self._row_boxes(source.shard, whole):
                end += self._encode(source, box, buffer[end:])
            if source.role is Role.CODES:
                self._sample_error(buffer[piece.offset : end], source.shard, whole)
        buffer[end : bucket.payload_bytes] = 0

    def _encode(self, piece: PlannedPiece, box: Box, room: torch.Tensor) -> int:
        """Write the content of a box, part of the piece, to the start of `room`; returns the number of bytes."""
        match piece.role:
            case Role.VALUES:
                content = self._values(piece.shard, box).to(torch.bfloat16)
                self._add_products(piece.shard, box, content)
            case Role.CODES:
                assert self._layout is not None, "only 8-bit formats have codes"
                codes = room[: math.prod(box.shape)].view(getattr(torch, self._layout.dtype)).view(box.shape)
                if room.device == self._parameters[piece.shard.megatron_name].device:
                    self._add_products(piece.shard, box, self._codes(piece.shard, box, codes))
                else:  # a buffer of the host, and weights on a device
                    on_device = self._codes(piece.shard, box)
                    self._add_products(piece.shard, box, on_device)
                    codes.copy_(on_device)
                return codes.numel()
            case Role.SCALES:
                content = self._scales_of(piece.shard.hf_name)[box.slices((0, 0))]
        content = content.contiguous().view(-1).view(torch.uint8)
        room[: content.numel()].copy_(content)
        return content.numel()

    def _add_products(self, shard: Shard, box: Box, content: torch.Tensor) -> None:
        """Add a box's products with signs; `content` are its codes, or its values in BF16."""
        if shard.of_expert or not self._sums.are_wanted:
            return
        with self._times.measure("sums"):
            if self._plan.quantizes(shard):
                assert self._quantizer is not None and self._layout is not None, "only 8-bit formats have codes"
                scales = self._scales_of(shard.hf_name)[self._layout.touched(box.start, box.shape)]
                content = self._quantizer.values(content, scales, box.start)
            self._sums.add(shard, box, products_of(content, box, shard.hf_full_shape))

    def _row_boxes(self, shard: Shard, box: Box) -> Iterator[Box]:
        """A box cut between blocks into boxes of some rows each; see `row_boxes`."""
        is_on_device = self._parameters[shard.megatron_name].device.type == "cuda"
        most = DEVICE_BOX_SIZE if is_on_device else CPU_BOX_SIZE
        return row_boxes(box, most=most, multiple=1 if self._layout is None else self._layout.block[0])

    def _sample_error(self, codes: torch.Tensor, shard: Shard, box: Box) -> None:
        """Record the quantisation error of some rows of a piece; `codes` are its bytes."""
        assert self._layout is not None, "only 8-bit formats have codes"
        rows, parameter = sampled_rows(box), self._parameters[shard.megatron_name]
        sampled = codes[: rows.size].view(getattr(torch, self._layout.dtype)).view(rows.shape).to(parameter.device)
        is_fp8 = fp8_parameters.is_fp8_parameter(parameter)
        self.watch.add(
            shard.hf_name,
            box,
            self._values(shard, rows),
            sampled,
            self._decoded(sampled, shard, rows),
            as_is=shard in self._as_is if is_fp8 else None,
        )

    @torch.no_grad()
    def published_values(self, megatron_name: str) -> torch.Tensor:
        """One parameter of this rank as the engines hold it, in the parameter's dtype. After `send`."""
        parameter = self._parameters[megatron_name]
        held = [shard for shard in self._held if shard.megatron_name == megatron_name]
        if fp8_parameters.is_fp8_parameter(parameter):
            published = fp8_parameters.decoded(parameter)
        elif sum(math.prod(shard.shape) for shard in held) == parameter.numel():
            published = torch.empty_like(parameter)
        else:  # padding keeps its values
            published = parameter.detach().clone()
        for shard in held:
            for box in self._row_boxes(shard, _whole(shard)):
                published[_local(shard, box)].copy_(self._round_trip(shard, box))
        return published

    @torch.no_grad()
    def published_fingerprint(self) -> Fingerprint:
        """Sums (`rollout.weights.fingerprint`) of what the last `send` sent, and of this rank's experts.

        The sums of an expert need all of its matrices, which other ranks may have sent, so they are computed here from
        the parameters.

        Raises:
            RuntimeError: the last `send` was without sums, or has failed.
        """
        fingerprint = self._sums.fingerprint()
        experts: dict[str, dict[str, Shard]] = {}
        for shard in self._held:
            if shard.of_expert and shard.owned and self._fingerprints(shard):
                expert, _, leaf = shard.hf_name.removesuffix("_proj.weight").rpartition(".")
                experts.setdefault(expert, {})[leaf] = shard
        for matrices in experts.values():
            gate, up, down = (
                self._round_trip(matrices[leaf], _whole(matrices[leaf])) for leaf in ("gate", "up", "down")
            )
            last = matrices["down"]
            outputs = through_expert(gate.float(), up.float(), down.float())
            fingerprint[last.hf_name] = fold(outputs, _whole(last), last.hf_full_shape)
        return fingerprint

    def _round_trip(self, shard: Shard, box: Box) -> torch.Tensor:
        if self._quantizer is None or self._layout is None or not self._plan.quantizes(shard):
            return self._values(shard, box).to(torch.bfloat16)
        return self._decoded(self._codes(shard, box), shard, box)

    def _decoded(self, codes: torch.Tensor, shard: Shard, box: Box) -> torch.Tensor:
        assert self._quantizer is not None and self._layout is not None, "only 8-bit formats have codes"
        scales = self._scales_of(shard.hf_name)[self._layout.touched(box.start, box.shape)]
        return self._quantizer.values(codes, scales, box.start)

    def _codes(self, shard: Shard, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Codes of a box; written to `out` if it is given."""
        assert self._quantizer is not None and self._layout is not None, "only 8-bit formats have codes"
        if shard in self._as_is:
            return copied_into(self._blocks(shard).codes[_local(shard, box)], out)
        factors = self._factors_of(shard.hf_name)[self._layout.touched(box.start, box.shape)]
        return self._quantizer.codes(self._values(shard, box), factors, box.start, out)

    def _values(self, shard: Shard, box: Box) -> torch.Tensor:
        return fp8_parameters.values(self._parameters[shard.megatron_name], _local(shard, box))

    def _has_equal_blocks(self, shard: Shard) -> bool:
        parameter = self._parameters[shard.megatron_name]
        return fp8_parameters.is_fp8_parameter(parameter) and blocks_agree(shard, tuple(parameter.shape))

    def _blocks(self, shard: Shard) -> fp8_parameters.Blocks:
        parameter = self._parameters[shard.megatron_name]
        assert fp8_parameters.is_fp8_parameter(parameter), "only FP8 parameters have blocks"
        return fp8_parameters.Blocks.of(parameter)


def row_boxes(box: Box, *, most: int, multiple: int) -> Iterator[Box]:
    """Cut a box from top to bottom into boxes of whole rows.

    Args:
        box: of a tensor of one or two dimensions.
        most: upper bound of the elements of each; one run of `multiple` rows may exceed it.
        multiple: each box ends at a multiple of this many rows of the tensor, or at the end of `box`.
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
    """Index of a box, which lies in the shard, into the parameter that holds the shard."""
    origin = tuple(hf - local for hf, local in zip(shard.hf_start, shard.megatron_start, strict=True))
    return box.slices(origin)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Add the tensor's name to a `ValueError` about its weights."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}; the policy has diverged and is not published") from None
