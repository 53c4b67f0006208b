"""Decides which matrices of FP8 parameters are published unchanged, by comparing grids of blocks. No tensor is needed.

An FP8 parameter has a scale for each 128 x 128 block of its own rows and columns. Megatron fuses query, key and value,
fuses gate and up, and cuts them all over ranks. Engines count blocks from the first row of each Hugging Face matrix.
Where every block that a box touches holds the same weights in both grids, codes and scales are sent byte for byte.
Elsewhere weights are decoded and quantised again.

Pure: no torch.
"""

from collections.abc import Iterable
from dataclasses import replace

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.shards import Kind, Shard, rank_shards
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
    """Whether an interval begins with a block in both tensors, and ends with a block or with both tensors."""
    if hf_start % FP8_BLOCK or megatron_start % FP8_BLOCK:
        return False
    return size % FP8_BLOCK == 0 or (hf_start + size == hf_size and megatron_start + size == megatron_size)


def parameter_shapes(held: Iterable[Shard]) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter that these shards make up, by Megatron's name; vocabulary padding is left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in held:
        ends = tuple(start + n for start, n in zip(shard.megatron_start, shard.shape, strict=True))
        known = shapes.get(shard.megatron_name, ends)
        shapes[shard.megatron_name] = tuple(max(pair) for pair in zip(known, ends, strict=True))
    return shapes


def rank_matrices(spec: ModelSpec, parallel: ParallelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each matrix of the first decoder layer as a trainer rank holds it, by Megatron's name."""
    return parameter_shapes(_linears(spec, parallel, tensor_rank=0))


def cut_otherwise(spec: ModelSpec, parallel: ParallelConfig) -> tuple[str, ...]:
    """Last names (`q_proj`) of the matrices whose blocks differ between some trainer rank and the engines."""
    names: dict[str, None] = {}
    for rank in range(parallel.tensor):
        held = _linears(spec, parallel, tensor_rank=rank)
        shapes = parameter_shapes(held)
        for shard in held:
            if not blocks_agree(shard, shapes[shard.megatron_name]):
                names[shard.hf_name.removesuffix(".weight").rpartition(".")[2]] = None
    return tuple(names)


def _linears(spec: ModelSpec, parallel: ParallelConfig, *, tensor_rank: int) -> list[Shard]:
    """Matrices of one decoder layer, with those of its first expert only: all layers and experts are cut alike."""
    held = rank_shards(
        replace(spec, num_layers=1),
        ParallelConfig(tensor=parallel.tensor),
        tensor_rank=tensor_rank,
        pipeline_rank=0,
        uses_te_layer_names=True,
    )
    return [shard for shard in held if shard.kind is Kind.LINEAR and not shard.expert]
