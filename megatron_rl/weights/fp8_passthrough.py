"""Which matrices of FP8 parameters can be published as they are: a comparison of grids, before any tensor exists.

A parameter that is FP8 itself has a scale for each 128 x 128 of its own rows and columns. Megatron fuses query, key
and value, and gate and up, and cuts all over ranks; engines count blocks from the first row of each Hugging Face
matrix. Where every block of one grid that a box touches holds the same weights as a block of the other, codes and
scales are taken over byte for byte; elsewhere weights are decoded and quantised once more.

Pure: no torch.
"""

from collections.abc import Iterable

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.shards import Kind, Shard, shards
from rollout.weights.format import FP8_BLOCK


def blocks_agree(shard: Shard, parameter_shape: tuple[int, ...]) -> bool:
    """Whether the box lies in the same blocks in the Hugging Face matrix and in the parameter that holds it."""
    dimensions = zip(
        shard.hf_start,
        shard.megatron_start,
        shard.shape,
        shard.hf_full_shape,
        parameter_shape,
        strict=True,
    )
    return len(parameter_shape) == 2 and all(_agree(*dimension) for dimension in dimensions)


def _agree(hf_start: int, megatron_start: int, size: int, hf_size: int, megatron_size: int) -> bool:
    """Along one dimension: begun with a block on both sides, and ended with one, or where both end."""
    if hf_start % FP8_BLOCK or megatron_start % FP8_BLOCK:
        return False
    return size % FP8_BLOCK == 0 or (hf_start + size == hf_size and megatron_start + size == megatron_size)


def parameter_shapes(held: Iterable[Shard]) -> dict[str, tuple[int, ...]]:
    """Of a rank that holds these boxes and nothing else (the padding of a vocabulary is not counted)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for one in held:
        ends = tuple(start + n for start, n in zip(one.megatron_start, one.shape, strict=True))
        known = shapes.get(one.megatron_name, ends)
        shapes[one.megatron_name] = tuple(max(pair) for pair in zip(known, ends, strict=True))
    return shapes


def rank_matrices(spec: ModelSpec, parallel: ParallelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each matrix of the first decoder layer as a trainer rank holds it, by Megatron's name."""
    held = _linears(spec, parallel, tensor_rank=0)
    return parameter_shapes(held)


def cut_otherwise(spec: ModelSpec, parallel: ParallelConfig) -> tuple[str, ...]:
    """Last names of the matrices (`q_proj`) that some trainer rank holds in other blocks than engines do."""
    found: dict[str, None] = {}
    for rank in range(parallel.tensor):
        held = _linears(spec, parallel, tensor_rank=rank)
        shapes = parameter_shapes(held)
        for one in held:
            if not blocks_agree(one, shapes[one.megatron_name]):
                found[one.hf_name.removesuffix(".weight").rpartition(".")[2]] = None
    return tuple(found)


def _linears(spec: ModelSpec, parallel: ParallelConfig, *, tensor_rank: int) -> list[Shard]:
    """Of one decoder layer, and of one of its experts: the others are cut alike."""
    held = shards(
        spec,
        tensor=parallel.tensor,
        tensor_rank=tensor_rank,
        layers=range(1),
        first=False,
        last=False,
        uses_te_layer_names=True,
    )
    return [one for one in held if one.kind is Kind.LINEAR and not one.expert]
