"""Where every Hugging Face tensor lives inside the Megatron model: a walk over the table of names.

`shards` applies `name_table.TABLE` to one rank and gives the complete list of boxes: this box of
that Hugging Face tensor is this slice of that local parameter, under the names of the local layer spec
or of Transformer Engine's. Loading, exporting and publishing are the same walk over that list.

Invariants (tests/megatron_rl/weights/test_shards.py): over all ranks the *owned* shards tile every Hugging
Face tensor exactly once; on one rank shards tile every parameter exactly once, padding apart.

Words for a cut tensor: a `Shard` is what a trainer rank holds, a `Box` coordinates, a `Piece` a box in a bucket, and a
`Landing` the place in an engine's parameters where a box ends.

Pure: no torch, no megatron. A shard never changes dtype or transposes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import ModelSpec, stage_layers
from megatron_rl.weights.name_table import TABLE, Rule, Split, Where
from megatron_rl.weights.name_table import Kind as Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One box of a Hugging Face tensor and the slice of a local parameter that holds it."""

    hf_name: str
    hf_full_shape: tuple[int, ...]
    hf_start: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the box, on both sides."""
    megatron_name: str
    """Parameter name inside this rank's model chunk (layer numbers count from 0 in each stage)."""
    megatron_start: tuple[int, ...]
    kind: Kind
    replicated: bool
    """Every tensor-parallel rank holds this box."""
    owned: bool
    """This rank answers for the box: among all ranks that hold one replica of it in parts exactly one owns it."""
    expert: int | None
    """Number of the expert whose matrix it is, in the whole model."""

    @property
    def of_expert(self) -> bool:
        """It is an expert's: data-parallel ranks hold the same experts only if `parallel.expert` apart."""
        return self.expert is not None

    @property
    def hf_slices(self) -> tuple[slice, ...]:
        """Index of the box in the Hugging Face tensor."""
        return tuple(slice(start, start + n) for start, n in zip(self.hf_start, self.shape, strict=True))

    @property
    def megatron_slices(self) -> tuple[slice, ...]:
        """Index of the box in the local parameter."""
        return tuple(slice(start, start + n) for start, n in zip(self.megatron_start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class _Interval:
    """Offsets of one box along one dimension (0 rows, 1 columns)."""

    dim: int
    hf: int
    megatron: int
    size: int


def _part(shape: tuple[int, ...], dim: int, tp: int, rank: int, *, megatron: int = 0) -> list[_Interval]:
    size = shape[dim] // tp
    return [_Interval(dim, rank * size, megatron, size)]


def _vocab_part(spec: ModelSpec, tp: int, rank: int) -> list[_Interval]:
    rows = spec.padded_vocab_size(tp) // tp
    size = min(rows, spec.vocab_size - rank * rows)
    return [_Interval(0, rank * rows, 0, size)] if size > 0 else []


def _qkv_part(spec: ModelSpec, tp: int, rank: int, part: Split) -> list[_Interval]:
    """Boxes of q, k or v: one per query group of the rank."""
    groups, heads, dim = spec.num_kv_heads // tp, spec.num_heads // spec.num_kv_heads, spec.head_dim
    size = heads * dim if part is Split.Q else dim
    offset = {Split.Q: 0, Split.K: heads * dim, Split.V: (heads + 1) * dim}[part]
    stride = (heads + 2) * dim
    return [_Interval(0, (rank * groups + group) * size, group * stride + offset, size) for group in range(groups)]


_SPLITS: dict[Split, Callable[[ModelSpec, tuple[int, ...], int, int], list[_Interval]]] = {
    Split.REPLICATED: lambda spec, shape, tp, rank: [_Interval(0, 0, 0, shape[0])],
    Split.COLUMNS: lambda spec, shape, tp, rank: _part(shape, 1, tp, rank),
    Split.VOCAB: lambda spec, shape, tp, rank: _vocab_part(spec, tp, rank),
    Split.Q: lambda spec, shape, tp, rank: _qkv_part(spec, tp, rank, Split.Q),
    Split.K: lambda spec, shape, tp, rank: _qkv_part(spec, tp, rank, Split.K),
    Split.V: lambda spec, shape, tp, rank: _qkv_part(spec, tp, rank, Split.V),
    Split.GATE: lambda spec, shape, tp, rank: _part(shape, 0, tp, rank),
    Split.UP: lambda spec, shape, tp, rank: _part(shape, 0, tp, rank, megatron=shape[0] // tp),
}


def shards(
    spec: ModelSpec,
    *,
    tensor: int,
    tensor_rank: int,
    layers: range,
    first: bool,
    last: bool,
    expert: int = 1,
    expert_rank: int = 0,
    uses_te_layer_names: bool = False,
) -> tuple[Shard, ...]:
    """All boxes that one rank holds, in the order of the model: embedding, layers, final norm, output.

    `layers` are the global numbers of the stage's layers; `first` and `last` say whether the stage holds
    the embedding and the output layer; of each layer's experts the rank has the part `expert_rank` of `expert`.
    """
    found: list[Shard] = []
    for rule, hf_numbers, local_numbers in _rules(
        spec, layers, _experts(spec, expert, expert_rank), first=first, last=last
    ):
        shape = rule.shape(spec)
        name = rule.te if uses_te_layer_names and rule.te is not None else rule.local
        replicated = rule.split is Split.REPLICATED
        for box in _SPLITS[rule.split](spec, shape, tensor, tensor_rank):
            found.append(
                Shard(
                    hf_name=rule.hf.format(*hf_numbers),
                    hf_full_shape=shape,
                    hf_start=_along(box.dim, box.hf, len(shape)),
                    shape=(*shape[: box.dim], box.size, *shape[box.dim + 1 :]),
                    megatron_name=name.format(*local_numbers),
                    megatron_start=_along(box.dim, box.megatron, len(shape)),
                    kind=rule.kind,
                    replicated=replicated,
                    owned=not rule.tied_copy and (not replicated or tensor_rank == 0),
                    expert=hf_numbers[-1] if rule.per_expert else None,
                )
            )
    return tuple(found)


def _experts(spec: ModelSpec, expert: int, expert_rank: int) -> range:
    """Global numbers of the experts of one rank."""
    size = 0 if spec.experts is None else spec.experts.count // expert
    return range(expert_rank * size, (expert_rank + 1) * size)


def _rules(
    spec: ModelSpec, layers: range, experts: range, *, first: bool, last: bool
) -> Iterable[tuple[Rule, tuple[int, ...], tuple[int, ...]]]:
    """Rules of one stage in the order of the model, with the numbers in their names: in the whole model, and here."""
    table = [rule for rule in TABLE if rule.present(spec)]
    if first:
        yield from ((rule, (), ()) for rule in table if rule.where is Where.FIRST)
    for local, layer in enumerate(layers):
        in_layer = [rule for rule in table if rule.where is Where.LAYER]
        yield from ((rule, (layer,), (local,)) for rule in in_layer if not rule.per_expert)
        for place, expert in enumerate(experts):
            yield from ((rule, (layer, expert), (local, place)) for rule in in_layer if rule.per_expert)
    if last:
        # A stage that is first and last uses the embedding itself.
        yield from ((rule, (), ()) for rule in table if rule.where is Where.LAST and not (rule.tied_copy and first))


def _along(dim: int, offset: int, num_dims: int) -> tuple[int, ...]:
    return tuple(offset if d == dim else 0 for d in range(num_dims))


def rank_shards(
    spec: ModelSpec,
    parallel: ParallelConfig,
    *,
    tensor_rank: int,
    pipeline_rank: int,
    data_rank: int = 0,
    uses_te_layer_names: bool = False,
) -> tuple[Shard, ...]:
    """`shards` of the rank at these coordinates of a partition."""
    return shards(
        spec,
        tensor=parallel.tensor,
        tensor_rank=tensor_rank,
        layers=stage_layers(spec.num_layers, parallel.pipeline)[pipeline_rank],
        first=pipeline_rank == 0,
        last=pipeline_rank == parallel.pipeline - 1,
        expert=parallel.expert,
        expert_rank=data_rank % parallel.expert,
        uses_te_layer_names=uses_te_layer_names,
    )


def is_first_replica(shard: Shard, parallel: ParallelConfig, data_rank: int) -> bool:
    """Whether no data-parallel rank before this one holds the same box."""
    return data_rank < (parallel.expert if shard.of_expert else 1)


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face model with its shape, in the order of the model."""
    whole = shards(spec, tensor=1, tensor_rank=0, layers=range(spec.num_layers), first=True, last=True)
    return {shard.hf_name: shard.hf_full_shape for shard in whole}
