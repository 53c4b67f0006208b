"""Where every Hugging Face tensor lies inside the Megatron model, from the table of names.

`rank_shards` applies `name_table.TABLE` to one trainer rank and returns its complete list of shards. Each shard says:
this box of this Hugging Face tensor is this box of this local parameter, under the parameter names of the local layer
spec or of Transformer Engine's. Loading, exporting and publishing all go through that list.

Invariants (tests/megatron_rl/weights/test_shards.py): over all ranks, the *owned* shards tile every Hugging Face tensor
exactly once. On one rank, the shards tile every parameter exactly once, except for padding.

Words for a cut tensor: a `Shard` is what a trainer rank holds, a `Box` is coordinates, a `Piece` is a box in a bucket,
and a `Landing` is the place in an engine's parameters where a box ends.

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
    """One box of a Hugging Face tensor, and the box of a local parameter that holds it."""

    hf_name: str
    hf_full_shape: tuple[int, ...]
    hf_start: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the box in both tensors."""
    megatron_name: str
    """Parameter name in this rank's pipeline stage; layer numbers count from 0 in each stage."""
    megatron_start: tuple[int, ...]
    kind: Kind
    replicated: bool
    """Whether every tensor-parallel rank holds this box."""
    owned: bool
    """Whether this rank sends the box. Of the ranks of one data-parallel replica, exactly one owns each box."""
    expert: int | None
    """Number of the matrix's expert in the whole model; None if the tensor belongs to no expert."""

    @property
    def of_expert(self) -> bool:
        """Whether the tensor belongs to an expert. Ranks `parallel.expert` data ranks apart hold the same experts."""
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


def _even(shape: tuple[int, ...], dim: int, tp: int, rank: int, *, megatron: int = 0) -> list[_Interval]:
    size = shape[dim] // tp
    return [_Interval(dim, rank * size, megatron, size)]


def _vocab(spec: ModelSpec, tp: int, rank: int) -> list[_Interval]:
    rows = spec.padded_vocab_size(tp) // tp
    size = min(rows, spec.vocab_size - rank * rows)
    return [_Interval(0, rank * rows, 0, size)] if size > 0 else []


def _qkv(spec: ModelSpec, tp: int, rank: int, split: Split) -> list[_Interval]:
    """Intervals of q, k or v in this rank's rows of the fused matrix, which holds q, k and v group after group.

    With more ranks than key/value heads, the rows of a group are cut between ranks, which gather their products.
    """
    heads, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    size = heads * dim if split is Split.Q else dim
    offset = {Split.Q: 0, Split.K: heads * dim, Split.V: (heads + 1) * dim}[split]
    stride = (heads + 2) * dim
    rows = spec.num_kv_heads * stride // tp
    found = []
    for group in range(spec.num_kv_heads):
        begin = group * stride + offset
        first, last = max(begin, rank * rows), min(begin + size, (rank + 1) * rows)
        if first < last:
            found.append(_Interval(0, group * size + first - begin, first - rank * rows, last - first))
    return found


_SPLITS: dict[Split, Callable[[ModelSpec, tuple[int, ...], int, int], list[_Interval]]] = {
    Split.REPLICATED: lambda spec, shape, tp, rank: [_Interval(0, 0, 0, shape[0])],
    Split.COLUMNS: lambda spec, shape, tp, rank: _even(shape, 1, tp, rank),
    Split.VOCAB: lambda spec, shape, tp, rank: _vocab(spec, tp, rank),
    Split.Q: lambda spec, shape, tp, rank: _qkv(spec, tp, rank, Split.Q),
    Split.K: lambda spec, shape, tp, rank: _qkv(spec, tp, rank, Split.K),
    Split.V: lambda spec, shape, tp, rank: _qkv(spec, tp, rank, Split.V),
    Split.GATE: lambda spec, shape, tp, rank: _even(shape, 0, tp, rank),
    Split.UP: lambda spec, shape, tp, rank: _even(shape, 0, tp, rank, megatron=shape[0] // tp),
}


def rank_shards(
    spec: ModelSpec,
    parallel: ParallelConfig,
    *,
    tensor_rank: int,
    pipeline_rank: int,
    data_rank: int = 0,
    uses_te_layer_names: bool = False,
) -> tuple[Shard, ...]:
    """All shards of one trainer rank, in the order of the model: embedding, layers, final norm, output.

    Args:
        spec: the model.
        parallel: its partition over trainer ranks.
        tensor_rank: the rank's coordinate, below `parallel.tensor`.
        pipeline_rank: likewise, below `parallel.pipeline`.
        data_rank: likewise, below `parallel.data`; it decides which experts the rank holds.
        uses_te_layer_names: whether parameters have the names of Transformer Engine's layers.
    """
    held: list[Shard] = []
    for rule, hf_numbers, local_numbers in _rules(
        spec,
        stage_layers(spec.num_layers, parallel.pipeline)[pipeline_rank],
        _experts(spec, parallel.expert, data_rank % parallel.expert),
        first=pipeline_rank == 0,
        last=pipeline_rank == parallel.pipeline - 1,
    ):
        shape = rule.shape(spec)
        name = rule.te if uses_te_layer_names and rule.te is not None else rule.local
        replicated = rule.split is Split.REPLICATED
        for interval in _SPLITS[rule.split](spec, shape, parallel.tensor, tensor_rank):
            held.append(
                Shard(
                    hf_name=rule.hf.format(*hf_numbers),
                    hf_full_shape=shape,
                    hf_start=_along(interval.dim, interval.hf, len(shape)),
                    shape=(*shape[: interval.dim], interval.size, *shape[interval.dim + 1 :]),
                    megatron_name=name.format(*local_numbers),
                    megatron_start=_along(interval.dim, interval.megatron, len(shape)),
                    kind=rule.kind,
                    replicated=replicated,
                    owned=not rule.tied_copy and (not replicated or tensor_rank == 0),
                    expert=hf_numbers[-1] if rule.per_expert else None,
                )
            )
    return tuple(held)


def trunk_shards(shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """The shards of a rank without those of its output layer: what a critic has of a Hugging Face model."""
    return tuple(shard for shard in shards if not shard.megatron_name.startswith("output_layer."))


def whole_shards(spec: ModelSpec) -> tuple[Shard, ...]:
    """Every tensor of the Hugging Face model as one shard (query, key and value as several), in the model's order."""
    return rank_shards(spec, ParallelConfig(), tensor_rank=0, pipeline_rank=0)


def _experts(spec: ModelSpec, expert: int, expert_rank: int) -> range:
    """Global numbers of the experts of one rank."""
    size = 0 if spec.experts is None else spec.experts.count // expert
    return range(expert_rank * size, (expert_rank + 1) * size)


def _rules(
    spec: ModelSpec, layers: range, experts: range, *, first: bool, last: bool
) -> Iterable[tuple[Rule, tuple[int, ...], tuple[int, ...]]]:
    """Rules of one pipeline stage in the order of the model.

    Each comes with the numbers (layer, expert) in its Hugging Face name and in the name of its local parameter.
    """
    table = [rule for rule in TABLE if rule.present(spec)]
    if first:
        yield from ((rule, (), ()) for rule in table if rule.where is Where.FIRST)
    for local_layer, layer in enumerate(layers):
        in_layer = [rule for rule in table if rule.where is Where.LAYER]
        yield from ((rule, (layer,), (local_layer,)) for rule in in_layer if not rule.per_expert)
        for local_expert, expert in enumerate(experts):
            yield from ((rule, (layer, expert), (local_layer, local_expert)) for rule in in_layer if rule.per_expert)
    if last:
        # A stage that is both first and last has no copy of a tied embedding.
        yield from ((rule, (), ()) for rule in table if rule.where is Where.LAST and not (rule.tied_copy and first))


def _along(dim: int, offset: int, num_dims: int) -> tuple[int, ...]:
    return tuple(offset if d == dim else 0 for d in range(num_dims))


def is_first_replica(shard: Shard, parallel: ParallelConfig, data_rank: int) -> bool:
    """Whether no data-parallel rank before this one holds the same box."""
    return data_rank < (parallel.expert if shard.of_expert else 1)


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face model with its shape, in the order of the model."""
    return {shard.hf_name: shard.hf_full_shape for shard in whole_shards(spec)}
