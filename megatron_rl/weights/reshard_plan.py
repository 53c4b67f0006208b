"""Plans a publish: which trainer rank puts which box of which tensor into which bucket.

The plan is pure metadata. Every rank and the controller compute the same plan from the model's description and its
partition, without communication or torch. `megatron_rl.weights.packer` executes it.

One rank that owns a box (`Shard.owned`) sends it as the rank holds it: nothing is gathered. Data-parallel replicas hold
the same boxes and share their buckets, so that each replica sends about as many bytes. In an 8-bit format a matrix
becomes codes, cut as the matrix is, and a grid of scales. Each box sends the scales of the blocks that begin in it.
Where a border between boxes cuts a block, all ranks agree on its scale (`ReshardPlan.shared`). Experts' matrices travel
in their layer's stacks. Boxes are cut once more at the borders of the boxes that engine ranks require (`Required`,
recorded from vLLM's loaders), and each piece goes to the ranks that require it.

Invariants: `WeightManifest.check` holds for every plan. Tensors, and each rank's pieces, are in the order of the model,
so a receiver can load layer by layer and hold few buckets. Buckets are in the order of the first tensor they hold.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import ModelSpec
from megatron_rl.ranks import TrainerRank, trainer_ranks
from megatron_rl.weights.shards import Kind, Shard, is_first_replica, rank_shards, whole_shards
from rollout.types import WeightVersion
from rollout.weights.format import CodeLayout, WeightFormat
from rollout.weights.manifest import (
    DTYPE_BYTES,
    PIECE_ALIGNMENT,
    TRAILER,
    Box,
    Bucket,
    Piece,
    Required,
    TensorSpec,
    WeightManifest,
    stack_of,
)

QUANTIZED_KINDS = frozenset({Kind.LINEAR})
"""Kinds that an 8-bit format quantises, except for its exceptions; everything else travels as bfloat16."""


class Role(enum.Enum):
    """Content of a piece."""

    VALUES = "values"
    """The box itself, as bfloat16."""
    CODES = "codes"
    """The box's 8-bit codes."""
    SCALES = "scales"
    """The scales of the blocks that begin in the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPiece:
    """A piece, and the shard that its sender makes it from."""

    shard: Shard
    role: Role
    tensor: int
    """Index into `ReshardPlan.tensors`."""
    box: Box
    num_bytes: int
    engine_ranks: tuple[int, ...]
    """Ranks of each engine that require it; () for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """Every tensor, bucket and piece of a publish."""

    format: WeightFormat
    tensors: tuple[TensorSpec, ...]
    shared: tuple[str, ...]
    """Matrices (each expert's by itself) with a block that a border between boxes cuts, in the order of the model.
    The ranks that hold such a matrix must agree on its scales."""
    buckets: tuple[Bucket, ...]
    pieces: tuple[tuple[PlannedPiece, ...], ...]
    """[bucket][piece], in the order of `buckets[i].pieces`."""
    num_layers: int

    def manifest(self, run_id: str, weight_version: WeightVersion) -> WeightManifest:
        """The manifest of one publish that follows this plan."""
        return WeightManifest(
            run_id=run_id,
            weight_version=weight_version,
            format=self.format.name,
            tensors=self.tensors,
            buckets=self.buckets,
        )

    def quantizes(self, shard: Shard) -> bool:
        """Whether a shard belongs to a matrix that travels as codes."""
        return _quantizes(self.format, shard, self.num_layers)

    def buckets_of(self, rank: int) -> tuple[Bucket, ...]:
        """Buckets that one trainer rank sends, in order."""
        return tuple(bucket for bucket in self.buckets if bucket.source_rank == rank)

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """Trainer ranks that send at least one bucket, ascending."""
        return tuple(sorted({bucket.source_rank for bucket in self.buckets}))


_RequiredOfMatrix = Mapping[tuple[str, int], Sequence[Box]]
"""Boxes that one engine rank requires, by tensor and expert."""


def plan_reshard(
    spec: ModelSpec,
    parallel: ParallelConfig,
    *,
    format: WeightFormat,
    bucket_bytes: int,
    uses_te_layer_names: bool,
    required: Sequence[Required] = (),
) -> ReshardPlan:
    """The plan of every publish of a run.

    Args:
        spec: the model.
        parallel: how the trainer holds it.
        format: the engines' weight format.
        bucket_bytes: upper bound of a bucket; a larger piece has a bucket of its own.
        uses_te_layer_names: whether the model has Transformer Engine's parameter names (`model.layer_names`).
        required: for each rank of an engine, the boxes it requires; empty if every rank gets everything.
    """
    tensors = wire_tensors(spec, format)
    index = {tensor.name: number for number, tensor in enumerate(tensors)}
    by_expert = [_by_expert(boxes) for boxes in required]
    shared: set[str] = set()
    filled: list[tuple[int, list[PlannedPiece]]] = []
    ranks = trainer_ranks(parallel, cpu_threads=1)
    for rank in ranks:
        if rank.data_rank < parallel.expert:
            held = rank_shards(
                spec,
                parallel,
                tensor_rank=rank.tensor_rank,
                pipeline_rank=rank.pipeline_rank,
                data_rank=rank.data_rank,
                uses_te_layer_names=uses_te_layer_names,
            )
            held = tuple(shard for shard in held if is_first_replica(shard, parallel, rank.data_rank))
            layouts = [(shard, format.layout if _quantizes(format, shard, spec.num_layers) else None) for shard in held]
            shared.update(shard.hf_name for shard, layout in layouts if layout and layout.cuts(shard.hf_start))
            # with expert parallelism, experts have other sets of replicas than all other tensors
            for of_experts in (False, True) if parallel.expert > 1 else (None,):
                pieces = [
                    piece
                    for shard, layout in layouts
                    if shard.owned and of_experts in (None, shard.of_expert)
                    for piece in _pieces(shard, layout, tensors, index, by_expert)
                ]
                replicas = _replicas(ranks, rank, parallel.expert if of_experts else 1)
                filled += _share(_buckets(pieces, bucket_bytes), replicas)
    filled.sort(key=lambda entry: (entry[1][0].tensor, entry[0], entry[1][0].engine_ranks, entry[1][0].box.start))
    return ReshardPlan(
        format=format,
        tensors=tensors,
        shared=tuple(name for tensor in tensors for name in tensor.unstacked if name in shared),
        buckets=tuple(_bucket(number, rank, pieces) for number, (rank, pieces) in enumerate(filled)),
        pieces=tuple(tuple(pieces) for _, pieces in filled),
        num_layers=spec.num_layers,
    )


def wire_tensors(spec: ModelSpec, format: WeightFormat) -> tuple[TensorSpec, ...]:
    """Every tensor of a publish, in the order of the model."""
    tensors: list[TensorSpec] = []
    for name, shard in {stack_of(shard.hf_name): shard for shard in whole_shards(spec)}.items():
        stack = (spec.experts.count,) if spec.experts is not None and shard.of_expert else ()
        shape, layout = shard.hf_full_shape, format.layout
        if layout is not None and _quantizes(format, shard, spec.num_layers):
            grid = layout.grid(shape)
            tensors.append(TensorSpec(name=name, shape=stack + shape, dtype=layout.dtype))
            tensors.append(TensorSpec(name=name + layout.scale_suffix, shape=stack + grid, dtype="float32"))
        else:
            tensors.append(TensorSpec(name=name, shape=stack + shape, dtype="bfloat16"))
    return tuple(tensors)


def _quantizes(format: WeightFormat, shard: Shard, num_layers: int) -> bool:
    return format.layout is not None and shard.kind in QUANTIZED_KINDS and not format.excepts(shard.hf_name, num_layers)


def _pieces(
    shard: Shard,
    layout: CodeLayout | None,
    tensors: tuple[TensorSpec, ...],
    index: dict[str, int],
    required: Sequence[_RequiredOfMatrix],
) -> Iterator[PlannedPiece]:
    """Pieces of a shard's values, or of its codes and scales, each with the engine ranks that require it."""
    box = Box(start=shard.hf_start, shape=shard.shape)
    stack = stack_of(shard.hf_name)
    contents = [(stack, box, Role.VALUES if layout is None else Role.CODES)]
    if layout is not None:
        rows, columns = layout.begun(shard.hf_start, shard.shape)
        begun = Box(start=(rows.start, columns.start), shape=(rows.stop - rows.start, columns.stop - columns.start))
        contents.append((stack + layout.scale_suffix, begun, Role.SCALES))
    for name, whole, role in contents:
        width = DTYPE_BYTES[tensors[index[name]].dtype]
        if shard.expert is not None:
            whole = Box(start=(shard.expert, *whole.start), shape=(1, *whole.shape))
        for cut, ranks in _cut(whole, [boxes.get((name, whole.expert), ()) for boxes in required]):
            yield PlannedPiece(
                shard=shard, role=role, tensor=index[name], box=cut, num_bytes=cut.size * width, engine_ranks=ranks
            )


def _by_expert(required: Required) -> _RequiredOfMatrix:
    by_expert: dict[tuple[str, int], list[Box]] = {}
    for name, boxes in required.items():
        for box in boxes:
            by_expert.setdefault((name, box.expert), []).append(box)
    return by_expert


def _cut(box: Box, required: Sequence[Sequence[Box]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cut a box at the borders of required boxes; yields each cut with the engine ranks that require it, () for all.

    Rank 0 gets the cuts that no rank requires, because a publish carries every tensor whole.
    """
    if not box.size:
        return
    borders = []
    for dim, (first, size) in enumerate(zip(box.start, box.shape, strict=True)):
        ends = {
            end
            for boxes in required
            for other in boxes
            for end in (other.start[dim], other.start[dim] + other.shape[dim])
        }
        borders.append(sorted({first, first + size, *(end for end in ends if first < end < first + size)}))
    for corner in itertools.product(*(pairwise(ends) for ends in borders)):
        cut = Box(start=tuple(a for a, _ in corner), shape=tuple(b - a for a, b in corner))
        ranks = tuple(rank for rank, boxes in enumerate(required) if any(other.holds(cut) for other in boxes))
        yield cut, () if len(ranks) == len(required) else ranks or (0,)


def _fill(pieces: list[PlannedPiece], bucket_bytes: int) -> Iterator[list[PlannedPiece]]:
    """Split pieces, in order, into buckets of at most `bucket_bytes`; a larger piece has a bucket of its own."""
    bucket: list[PlannedPiece] = []
    used = 0
    for piece in pieces:
        size = _aligned(piece.num_bytes)
        if bucket and used + size + TRAILER.size > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(piece)
        used += size
    if bucket:
        yield bucket


def _buckets(pieces: list[PlannedPiece], bucket_bytes: int) -> list[list[PlannedPiece]]:
    """Buckets of one rank's pieces in the order of the model; each bucket goes to one set of engine ranks."""
    pieces.sort(key=lambda piece: piece.tensor)  # a matrix in several boxes: all its codes, then all its scales
    return [
        bucket
        for ranks in sorted({piece.engine_ranks for piece in pieces})
        for bucket in _fill([piece for piece in pieces if piece.engine_ranks == ranks], bucket_bytes)
    ]


def _replicas(ranks: Sequence[TrainerRank], rank: TrainerRank, spread: int) -> list[int]:
    """Ranks that hold the same shards as `rank`: equal tensor and pipeline rank, `spread` data-parallel ranks apart."""
    return [
        other.rank
        for other in ranks
        if (other.tensor_rank, other.pipeline_rank) == (rank.tensor_rank, rank.pipeline_rank)
        and other.data_rank % spread == rank.data_rank % spread
    ]


def _share(buckets: Sequence[list[PlannedPiece]], replicas: Sequence[int]) -> Iterator[tuple[int, list[PlannedPiece]]]:
    """Assign each bucket, largest first, to the replica with the fewest bytes so far."""
    load = dict.fromkeys(replicas, 0)
    for bucket in sorted(buckets, key=_num_bytes, reverse=True):
        rank = min(load, key=lambda replica: (load[replica], replica))
        load[rank] += _num_bytes(bucket)
        yield rank, bucket


def _num_bytes(pieces: Sequence[PlannedPiece]) -> int:
    return sum(_aligned(piece.num_bytes) for piece in pieces)


def _bucket(number: int, rank: int, planned: list[PlannedPiece]) -> Bucket:
    pieces: list[Piece] = []
    offset = 0
    for piece in planned:
        pieces.append(Piece(tensor=piece.tensor, start=piece.box.start, shape=piece.box.shape, offset=offset))
        offset += _aligned(piece.num_bytes)
    return Bucket(
        index=number,
        source_rank=rank,
        num_bytes=offset + TRAILER.size,
        pieces=tuple(pieces),
        engine_ranks=planned[0].engine_ranks,
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
