"""The state of Megatron's distributed optimizer as boxes of the model's tensors: sharded, and free of the partition.

Megatron offers two layouts. One lets each data-parallel rank write its own slice of the flat buffer, but binds the
checkpoint to tensor and pipeline parallelism. The other is free of the partition, but every rank gathers the state of
all data-parallel ranks, 12 bytes a parameter, on save and on load. A slice is a range of elements of each tensor, in
row-major order. Such a range is a few boxes: a part of a row, whole rows, a part of a row. With their offsets in the
whole tensor they have the advantages of both layouts: nothing is gathered, and any partition reads what it needs.

Names and whole shapes are those of Megatron's `fully_reshardable`, so checkpoints of that layout can be loaded.

Invariant: the boxes of all ranks cover each tensor once. No tensor is copied: boxes are views of the optimizer's state.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rollout.weights.manifest import Box

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Layout of the optimizer on disk, independent of the partition."""

BoxState: TypeAlias = dict[int, dict[str, list[ShardedTensor]]]
"""Boxes in the order of their elements, by parameter number and name of the state."""


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Boxes that hold elements `begin` to `end` of a tensor of this shape, in that order. Pure."""
    if begin >= end:
        return []
    if len(shape) == 1:
        return [Box(start=(begin,), shape=(end - begin,))]
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        return _of_row(shape, last, begin - last * row, end - last * row)
    found = _of_row(shape, first - 1, begin - (first - 1) * row, row) if begin < first * row else []
    if first < last:
        found.append(Box(start=(first, *[0] * (len(shape) - 1)), shape=(last - first, *shape[1:])))
    return found + _of_row(shape, last, 0, end - last * row)


def _of_row(shape: Sequence[int], row: int, begin: int, end: int) -> list[Box]:
    return [Box(start=(row, *box.start), shape=(1, *box.shape)) for box in boxes(shape[1:], begin, end)]


@contextmanager
def in_boxes(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Context in which distributed optimizers save and load `METADATA`'s layout as boxes."""
    parts = [part for part in _parts(optimizer) if isinstance(part, DistributedOptimizer)]
    for part in parts:
        part.sharded_param_state_fully_reshardable = partial(_state, part)
        part.load_parameter_state_from_fully_reshardable = partial(_load, part)
    try:
        yield
    finally:
        for part in parts:
            del part.sharded_param_state_fully_reshardable, part.load_parameter_state_from_fully_reshardable


def _parts(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers of a chain: of dense parameters and of experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _state(
    part: DistributedOptimizer,
    model: dict[str, object],
    is_loading: bool = False,
    metadata: dict[str, object] | None = None,
) -> BoxState:
    """Boxes of this rank's masters and moments; stands in for `sharded_param_state_fully_reshardable`."""
    del is_loading, metadata
    entries, _ = extract_sharded_tensors_and_factories(model)
    by_parameter = {id(entry.data): entry for entry in nested_values(entries)}
    return {
        number: {
            name: _boxes_of(name, tensor, by_parameter[id(parameter)], begin, part.distributed_optimizer_instance_id)
            for name, tensor in _tensors(part, parameter).items()
        }
        for number, (parameter, begin) in enumerate(_ranges(part))
    }


def _load(part: DistributedOptimizer, state: dict[int, dict[str, list[torch.Tensor]]]) -> None:
    """Set masters and moments; stands in for `load_parameter_state_from_fully_reshardable`.

    The loaded boxes are views of these tensors, unless the optimizer has replaced its state since.
    """
    with torch.no_grad():
        for number, (parameter, _) in enumerate(_ranges(part)):
            for name, tensor in _tensors(part, parameter).items():
                at = 0
                for box in state[number][name]:
                    tensor[at : at + box.numel()].copy_(box.reshape(-1))
                    at += box.numel()


def _ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Parameters of which this rank holds elements, and the first of these elements."""
    for of_dtypes in part.gbuf_ranges:
        for of_buckets in of_dtypes.values():
            for bucket in of_buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start


def _tensors(part: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Master and moments of this rank's elements, flat. The count of updates is saved with the parameter groups."""
    tensors = part._get_main_param_and_optimizer_states(parameter)
    return {name: tensor.detach() for name, tensor in tensors.items() if name != "step"}


def _boxes_of(
    name: str, tensor: torch.Tensor, entry: ShardedTensor | ShardedTensorFactory, begin: int, instance: int
) -> list[ShardedTensor]:
    """The boxes of `tensor`, which holds elements from `begin` of the parameter that `entry` describes."""
    found, end = [], begin + len(tensor)
    for piece, piece_begin in _pieces(entry):
        first = max(begin, piece_begin)
        last = min(end, piece_begin + prod(piece.local_shape))
        at = first - begin
        for box in boxes(piece.local_shape, first - piece_begin, last - piece_begin):
            shape = (*[1] * piece.prepend_axis_num, *box.shape)
            start = (*[0] * piece.prepend_axis_num, *box.start)
            found.append(
                ShardedTensor(
                    key=f"optimizer.state.{name}.{piece.key}",
                    data=tensor[at : at + prod(shape)].view(shape),
                    dtype=tensor.dtype,
                    local_shape=shape,
                    global_shape=piece.global_shape,
                    global_offset=tuple(a + b for a, b in zip(piece.global_offset, start, strict=True)),
                    axis_fragmentations=None,
                    # replicas over data parallelism hold other elements
                    replica_id=(*piece.replica_id[:2], instance),
                    allow_shape_mismatch=piece.allow_shape_mismatch,
                )
            )
            at += prod(shape)
    return found


def _pieces(entry: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]]:
    """The tensors of the checkpoint that hold a parameter, and the first element of the parameter in each.

    Megatron saves gate and up of a feed-forward network as two tensors, whose halves it takes from one parameter.
    """
    if isinstance(entry, ShardedTensor):
        return [(entry, 0)]
    without_memory = replace(entry, data=torch.empty(entry.data.shape, device="meta"))
    pieces = list(nested_values(without_memory.build()))
    for piece in pieces:
        assert piece.data.is_contiguous(), f"{piece.key}: elements of a piece lie apart in their parameter"
    return [(piece, piece.data.storage_offset()) for piece in pieces]
