"""Which parts of which tensors vLLM's own loaders take on one rank: recorded without a byte, then fed with just those.

vLLM's loaders take whole, unfused tensors under their Hugging Face names and cut their rank's part out of them
themselves. What they cut is found out by giving them *stand-ins*: tensors of the right names and shapes without
storage, of which every `copy_` tells a part by its offset, shape and strides; a stack is shown as its experts'
matrices. A publish is then copied as they were seen to copy (`rollout.worker.loader_replay`). Where loaders do more
than that, they load the publish themselves: they are given the stand-ins again, and whatever they copy out of one into
a real parameter is replaced by the part that came. So no table of ours says how vLLM fuses, shards or pads, and no rank
needs more than its own parts.

Invariant: every tensor is seen to be copied when loaders are recorded. One that a loader takes in another way (a cast,
a sum) is refused then, and not found out by wrong weights later.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader.reload import layerwise

from rollout.weights.manifest import Box, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where a part of a tensor ends up on one rank."""

    name: str
    """Of the tensor."""
    box: Box
    module: str
    parameter: str
    offset: int
    """Of its first element in the parameter's storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def start(self) -> int:
        """First row in the parameter."""
        return self.offset // max(self.strides[0] if self.strides else 1, 1)


@dataclass(frozen=True, slots=True)
class Recording:
    """What loaders were seen to do on one rank."""

    landings: tuple[Landing, ...]
    """What they copied where, in their order, each part once."""
    plain: frozenset[str]
    """Modules to which they did nothing else, and of which they filled all that is ever loaded."""


class Source(Protocol):
    """Who has the parts of tensors; `rollout.worker.received_parts.Arrivals`."""

    def part(self, name: str, box: Box) -> torch.Tensor:
        """A part of a tensor, of the box's shape."""

    def pieces(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """The same in boxes that make it up."""


_Copy = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""What to do for a copy of (name, destination, view of a stand-in)."""
_Look = Callable[[bool, Sequence[torch.Tensor], object], None]
"""Told of every other operation: whether it changes memory, the tensors it was given, what it has returned."""


class StandIns:
    """Tensors without storage, in the place of a publish's."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
        }

    def items(self, specs: Sequence[TensorSpec] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """For a model's `load_weights`, of all specs or of these, in their order."""
        for spec in self._specs if specs is None else specs:
            tensor = self._tensors[spec.name]
            yield from zip(spec.unstacked, tensor if spec.is_stack else (tensor,), strict=True)

    @torch.no_grad()
    def record(self, model: torch.nn.Module) -> Recording:
        """What the loaders of a model do on this rank; the model is left as it was.

        Raises:
            RuntimeError: a tensor is not copied at all, or not into a parameter.
        """
        found: dict[Landing, None] = {}
        opaque: set[str] = set()
        with _in_checkpoint_layout(model):
            homes = {
                parameter.untyped_storage()._cdata: (module, name)
                for module, layer in model.named_modules()
                for name, parameter in layer.named_parameters(recurse=False)
            }
            sizes = {module: layerwise.get_layer_size(layer) for module, layer in model.named_modules()}

            def note(name: str, destination: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
                module, parameter = homes.get(destination.untyped_storage()._cdata, ("", ""))
                box = self._box(name, view)
                landing = Landing(
                    name=name,
                    box=box,
                    module=module,
                    parameter=parameter,
                    offset=int(destination.storage_offset()),
                    shape=tuple(destination.shape),
                    strides=destination.stride(),
                )
                found[landing] = None
                if not self._is_box(name, view) or destination.shape != view.shape:
                    opaque.add(module)
                return destination

            def look(changes: bool, given: Sequence[torch.Tensor], result: object) -> None:
                of_result = result.untyped_storage()._cdata if isinstance(result, torch.Tensor) else None
                for tensor in given:
                    storage = tensor.untyped_storage()._cdata
                    if storage in homes and tensor.numel() and (changes or storage != of_result):
                        opaque.add(homes[storage][0])

            with _Copies(self._tensors, note, look):
                model.load_weights(self.items())  # type: ignore[operator]
        if lost := [landing.name for landing in found if not landing.parameter]:
            raise RuntimeError(f"vLLM's loaders copy {', '.join(lost[:5])} into no parameter of the model")
        if missing := self._tensors.keys() - {landing.name for landing in found}:
            names = ", ".join(sorted(missing)[:5])
            raise RuntimeError(f"vLLM's loaders do not copy {names}: no part of it can be sent alone")
        filled = Counter[str]()
        places: dict[str, set[tuple[str, int]]] = {}
        for landing in found:
            filled[landing.module] += math.prod(landing.shape)
            if (place := (landing.parameter, landing.offset)) in places.setdefault(landing.module, set()):
                opaque.add(landing.module)
            places[landing.module].add(place)
        plain = {module for module, size in filled.items() if size == sizes[module]}
        return Recording(tuple(found), frozenset(plain - opaque))

    def feed(self, source: Source) -> TorchDispatchMode:
        """While it is entered, what loaders copy out of stand-ins into real parameters comes from `source`."""

        def replace(name: str, destination: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
            if destination.is_meta:  # vLLM counts what a layer has been given before it gets memory
                return destination
            box = self._box(name, view)
            if self._is_box(name, view):
                copy_part(source, name, box, destination)
                return destination
            part = source.part(name, box)
            # a view that is no box was given the whole matrix
            first = part.storage_offset() + view.storage_offset() - box.expert * math.prod(box.in_matrix.shape)
            return destination.copy_(part.as_strided(view.shape, view.stride(), first))

        return _Copies(self._tensors, replace)

    def _box(self, name: str, view: torch.Tensor) -> Box:
        """The part that a view shows, of one matrix; the whole matrix for a view that is no box of it."""
        whole = self._tensors[name]
        left, start = view.storage_offset(), []
        for stride in whole.stride():
            start.append(left // stride)
            left %= stride
        stacked = max(whole.dim() - 2, 0)
        shape = view.shape
        if not self._is_box(name, view):
            start[stacked:], shape = (0,) * (whole.dim() - stacked), whole.shape[stacked:]
        return Box(start=tuple(start), shape=(1,) * stacked + tuple(shape))

    def _is_box(self, name: str, view: torch.Tensor) -> bool:
        """Whether a view is a box of one matrix; a transposed square is not, though it has the shape of one."""
        strides = self._tensors[name].stride()[-2:]
        pairs = zip(view.shape, view.stride(), strides, strict=False)
        return view.dim() == len(strides) and all(size <= 1 or ours == theirs for size, ours, theirs in pairs)


def copy_part(source: Source, name: str, box: Box, destination: torch.Tensor) -> None:
    """Copy a part of a tensor into memory of its shape (of one matrix), piece by piece."""
    if destination.dim() < 2:
        destination.copy_(source.part(name, box))
        return
    target = destination.view(box.shape)  # of a stack, with its first dimension
    for common, piece in source.pieces(name, box):
        target[common.slices(box.start)].copy_(piece)
        del piece  # its bucket need not be held until the next one has come


def wanted_of(landings: Sequence[Landing]) -> dict[str, tuple[Box, ...]]:
    """What a rank takes of each tensor, a `Required`."""
    found: dict[str, dict[Box, None]] = {}
    for landing in landings:
        found.setdefault(landing.name, {})[landing.box] = None
    return {name: tuple(boxes) for name, boxes in found.items()}


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Catches `copy_` out of stand-ins, whose storages are known by their identity."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], on_copy: _Copy, on_other: _Look | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
        self._on_copy = on_copy
        self._on_other = on_other

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            destination, view = args[:2]
            assert isinstance(destination, torch.Tensor) and isinstance(view, torch.Tensor)
            name = self._names.get(view.untyped_storage()._cdata)
            if name is not None:
                return self._on_copy(name, destination, view)
        result = func(*args, **(kwargs or {}))
        if self._on_other is not None:
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            self._on_other(func._schema.is_mutable, given, result)
        return result


@contextmanager
def _in_checkpoint_layout(model: torch.nn.Module) -> Iterator[None]:
    """A model's parameters on the meta device, with vLLM's bare loaders; afterwards the parameters it had."""
    absent = [(layer, name) for layer in model.modules() for name, one in layer._parameters.items() if one is None]
    layerwise.initialize_layerwise_reload(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        if hasattr(tensor, "weight_loader"):
            tensor.weight_loader = layerwise._get_original_loader(tensor)
    try:
        yield
    finally:
        model._do_torchao_reload = model._original_do_torchao_reload
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
        for layer, name in absent:  # what a kernel has packed away
            layer.register_parameter(name, None)
