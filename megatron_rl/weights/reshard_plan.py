"""Plans a publish: which trainer rank puts which box of which tensor into which bucket.

Pure metadata, computed alike by every rank and by the controller from the model's description and the
partition: no communication, no torch. Executing the plan is `megatron_rl.weights.packer`.

Each box is sent by one rank that owns it (`Shard.owned`), as the rank holds it: nothing is gathered. Data-parallel
replicas hold the same boxes and share their buckets, so that each sends about as many bytes. In an 8-bit format a
matrix becomes codes, cut as the matrix is, and a grid of scales, of which each box sends those whose block begins in
it; where a border between boxes cuts a block, all ranks agree on its scale (`ReshardPlan.shared`). Experts'
matrices travel as parts of their layer's stacks. Boxes are cut once more where what an engine rank takes begins or ends
(`Required`, as vLLM's loaders showed it), and each part goes to the ranks that take it.

Invariants: `WeightManifest.check` holds for every plan; tensors, and each rank's pieces, are in the
order of the model, so a receiver can load layer by layer with little in flight; buckets are in the order
of the first tensor they hold.
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
"""What an 8-bit format quantises but for its exceptions; everything else travels as bfloat16."""


class Role(enum.Enum):
    """What a piece holds of its shard."""

    VALUES = "values"
    """The box itself, as bfloat16."""
    CODES = "codes"
    """The box's 8-bit codes."""
    SCALES = "scales"
    """The scales of the blocks that begin in the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSource:
    """Where the bytes of one piece come from, on the rank that sends it."""

    shard: Shard
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """Every piece of a publish, and its source."""

    format: WeightFormat
    tensors: tuple[TensorSpec, ...]
    shared: tuple[str, ...]
    """Matrices (each expert's by itself) of which a block is cut by a border between boxes, in the order of the model:
    scales that ranks which hold parts of them must agree on."""
    buckets: tuple[Bucket, ...]
    sources: tuple[tuple[PieceSource, ...], ...]
    """[bucket][piece], beside `buckets[i].pieces`."""
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
        """Whether a box is of a matrix that travels as codes."""
        return _quantizes(self.format, shard, self.num_layers)

    def buckets_of(self, rank: int) -> tuple[Bucket, ...]:
        """What one trainer rank sends, in order."""
        return tuple(bucket for bucket in self.buckets if bucket.source_rank == rank)

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """Trainer ranks that send anything, ascending."""
        return tuple(sorted({bucket.source_rank for bucket in self.buckets}))


@dataclass(frozen=True, slots=True)
class _Pending:
    """A piece that is not in a bucket yet."""

    tensor: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    num_bytes: int
    engine_ranks: tuple[int, ...]
    """() for all."""
    source: PieceSource


_OfExperts = Mapping[tuple[str, int], Sequence[Box]]
"""What one engine rank takes, by tensor and expert."""


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
        format: of the engines.
        bucket_bytes: most bytes of a bucket, but for a piece that is larger.
        uses_te_layer_names: as the model was built (`model.layer_names`).
        required: by rank of an engine; empty where every rank gets everything.
    """
    tensors = wire_tensors(spec, format)
    index = {tensor.name: number for number, tensor in enumerate(tensors)}
    by_expert = [_by_expert(one) for one in required]
    shared: set[str] = set()
    filled: list[tuple[int, list[_Pending]]] = []
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
            held = tuple(p for p in held if is_first_replica(p, parallel, rank.data_rank))
            layouts = [(p, format.layout if _quantizes(format, p, spec.num_layers) else None) for p in held]
            shared.update(p.hf_name for p, layout in layouts if layout and layout.cuts(p.hf_start))
            # experts and the rest are held by other sets of replicas where experts are spread
            for spread in (False, True) if parallel.expert > 1 else (None,):
                items = [
                    item
                    for p, layout in layouts
                    if p.owned and spread in (None, p.of_expert)
                    for item in _items(p, layout, tensors, index, by_expert)
                ]
                replicas = _replicas(ranks, rank, parallel.expert if spread else 1)
                filled += _share(_buckets(items, bucket_bytes), replicas)
    filled.sort(key=lambda entry: (entry[1][0].tensor, entry[0], entry[1][0].engine_ranks, entry[1][0].start))
    return ReshardPlan(
        format=format,
        tensors=tensors,
        shared=tuple(name for tensor in tensors for name in tensor.unstacked if name in shared),
        buckets=tuple(_bucket(number, rank, items) for number, (rank, items) in enumerate(filled)),
        sources=tuple(tuple(item.source for item in items) for _, items in filled),
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


def _items(
    shard: Shard,
    layout: CodeLayout | None,
    tensors: tuple[TensorSpec, ...],
    index: dict[str, int],
    required: Sequence[_OfExperts],
) -> Iterator[_Pending]:
    box = Box(start=shard.hf_start, shape=shard.shape)
    stack = stack_of(shard.hf_name)
    found = [(stack, box, Role.VALUES if layout is None else Role.CODES)]
    if layout is not None:
        rows, columns = layout.begun(shard.hf_start, shard.shape)
        begun = Box(start=(rows.start, columns.start), shape=(rows.stop - rows.start, columns.stop - columns.start))
        found.append((stack + layout.scale_suffix, begun, Role.SCALES))
    for name, whole, role in found:
        width = DTYPE_BYTES[tensors[index[name]].dtype]
        if shard.expert is not None:
            whole = Box(start=(shard.expert, *whole.start), shape=(1, *whole.shape))
        for part, ranks in _cut(whole, [one.get((name, whole.expert), ()) for one in required]):
            source = PieceSource(shard=shard, role=role)
            yield _Pending(index[name], part.start, part.shape, part.size * width, ranks, source)


def _by_expert(required: Required) -> _OfExperts:
    found: dict[tuple[str, int], list[Box]] = {}
    for name, boxes in required.items():
        for box in boxes:
            found.setdefault((name, box.expert), []).append(box)
    return found


def _cut(box: Box, required: Sequence[Sequence[Box]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Parts of a box, and the engine ranks that want each; what nobody wants goes to rank 0: a publish is whole."""
    if not box.size:
        return
    borders = []
    for dim, (first, size) in enumerate(zip(box.start, box.shape, strict=True)):
        ends = {end for boxes in required for one in boxes for end in (one.start[dim], one.start[dim] + one.shape[dim])}
        borders.append(sorted({first, first + size, *(end for end in ends if first < end < first + size)}))
    for corner in itertools.product(*(pairwise(ends) for ends in borders)):
        part = Box(start=tuple(a for a, _ in corner), shape=tuple(b - a for a, b in corner))
        ranks = tuple(rank for rank, boxes in enumerate(required) if any(one.holds(part) for one in boxes))
        yield part, () if len(ranks) == len(required) else ranks or (0,)


def _fill(items: list[_Pending], bucket_bytes: int) -> Iterator[list[_Pending]]:
    """Cut one rank's pieces, in order, into runs of at most `bucket_bytes`; a larger piece stands alone."""
    bucket: list[_Pending] = []
    used = 0
    for item in items:
        size = _aligned(item.num_bytes)
        if bucket and used + size + TRAILER.size > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(item)
        used += size
    if bucket:
        yield bucket


def _buckets(items: list[_Pending], bucket_bytes: int) -> list[list[_Pending]]:
    """The pieces of one rank in the order of the model, those that go to the same engine ranks together."""
    items.sort(key=lambda item: item.tensor)  # a matrix in several boxes: all its codes, then all its scales
    return [
        bucket
        for ranks in sorted({item.engine_ranks for item in items})
        for bucket in _fill([item for item in items if item.engine_ranks == ranks], bucket_bytes)
    ]


def _replicas(ranks: Sequence[TrainerRank], rank: TrainerRank, spread: int) -> list[int]:
    """Ranks that hold what `rank` holds: at its place, `spread` data-parallel ranks apart."""
    return [
        one.rank
        for one in ranks
        if (one.tensor_rank, one.pipeline_rank) == (rank.tensor_rank, rank.pipeline_rank)
        and one.data_rank % spread == rank.data_rank % spread
    ]


def _share(buckets: Sequence[list[_Pending]], replicas: Sequence[int]) -> Iterator[tuple[int, list[_Pending]]]:
    """Give each bucket to the replica that has the fewest bytes so far, largest buckets first."""
    load = dict.fromkeys(replicas, 0)
    for bucket in sorted(buckets, key=_num_bytes, reverse=True):
        rank = min(load, key=lambda one: (load[one], one))
        load[rank] += _num_bytes(bucket)
        yield rank, bucket


def _num_bytes(items: Sequence[_Pending]) -> int:
    return sum(_aligned(item.num_bytes) for item in items)


def _bucket(number: int, rank: int, items: list[_Pending]) -> Bucket:
    pieces: list[Piece] = []
    offset = 0
    for item in items:
        pieces.append(Piece(tensor=item.tensor, start=item.start, shape=item.shape, offset=offset))
        offset += _aligned(item.num_bytes)
    return Bucket(
        index=number,
        source_rank=rank,
        num_bytes=offset + TRAILER.size,
        pieces=tuple(pieces),
        engine_ranks=items[0].engine_ranks,
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
