"""Records which box of which tensor vLLM's own loaders copy on one rank, and later feeds them exactly those boxes.

vLLM's loaders take whole, unfused tensors under their Hugging Face names and cut out their rank's share themselves. To
record the cuts, the loaders get *stand-ins*: tensors of the right names and shapes without storage. Every `copy_` out
of a stand-in shows a box by its offset, shape and strides; a stack is shown as its experts' matrices. A publish is
copied as recorded (`rollout.worker.loader_replay`). Where loaders do more than copy, they load the publish themselves:
they get the stand-ins again, and every copy out of a stand-in into a real parameter is replaced by a copy of the
received box. So this project needs no table of how vLLM fuses, shards or pads, and a rank receives only the boxes it
needs.

Invariant: the recording sees a copy of every tensor. A tensor that a loader uses in another way (a cast, a sum) is
refused when it is recorded, before wrong weights could be sampled from.
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
    """The place in a rank's parameters where a box of a tensor ends."""

    name: str
    """Name of the tensor."""
    box: Box
    module: str
    parameter: str
    offset: int
    """Elements from the start of the parameter's storage to the box's first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def start(self) -> int:
        """First row of the box in the parameter."""
        return self.offset // max(self.strides[0] if self.strides else 1, 1)


@dataclass(frozen=True, slots=True)
class Recording:
    """Copies that vLLM's loaders made on one rank."""

    landings: tuple[Landing, ...]
    """Every copied box with its place, in the loaders' order, each once."""
    plain: frozenset[str]
    """Modules that copies alone fill completely: no other operation touches their parameters."""


class BoxSource(Protocol):
    """Received boxes of tensors; `rollout.worker.received_pieces.ReceivedPieces`."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """One box of a tensor, in the box's shape."""

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """The same box without a copy: the boxes that make it up, with a view of each."""


_Copy = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""Called for a copy with (name, destination, view of a stand-in); returns the result of the copy."""
_Look = Callable[[bool, Sequence[torch.Tensor], object], None]
"""Called for every other operation with: whether it writes memory, its tensor arguments, its result."""


class StandIns:
    """Tensors without storage that stand for the tensors of a publish."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
        }

    def items(self, specs: Sequence[TensorSpec] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors for a model's `load_weights`: of the given specs in order, or of all."""
        for spec in self._specs if specs is None else specs:
            tensor = self._tensors[spec.name]
            yield from zip(spec.unstacked, tensor if spec.is_stack else (tensor,), strict=True)

    @torch.no_grad()
    def record(self, model: torch.nn.Module) -> Recording:
        """Record the copies that a model's loaders make on this rank; the model stays unchanged.

        Raises:
            RuntimeError: a tensor is never copied, or is copied to memory of no parameter.
        """
        landings: dict[Landing, None] = {}
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
                landings[landing] = None
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
        if lost := [landing.name for landing in landings if not landing.parameter]:
            raise RuntimeError(
                f"vLLM's loaders copy {', '.join(lost[:5])} to memory that belongs to no parameter of the model"
            )
        if missing := self._tensors.keys() - {landing.name for landing in landings}:
            names = ", ".join(sorted(missing)[:5])
            raise RuntimeError(f"vLLM's loaders do not copy {names}: its boxes for this rank are unknown")
        filled = Counter[str]()
        places: dict[str, set[tuple[str, int]]] = {}
        for landing in landings:
            filled[landing.module] += math.prod(landing.shape)
            if (place := (landing.parameter, landing.offset)) in places.setdefault(landing.module, set()):
                opaque.add(landing.module)
            places[landing.module].add(place)
        plain = {module for module, size in filled.items() if size == sizes[module]}
        return Recording(tuple(landings), frozenset(plain - opaque))

    def feed(self, source: BoxSource) -> TorchDispatchMode:
        """A context in which copies out of stand-ins into real parameters take their values from `source`."""

        def replace(name: str, destination: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
            if destination.is_meta:  # vLLM loads twice; the first time it only counts elements, without memory
                return destination
            box = self._box(name, view)
            if self._is_box(name, view):
                copy_box(source, name, box, destination)
                return destination
            matrix = source.read(name, box)
            # for a view that is no box, `box` is the whole matrix
            first = matrix.storage_offset() + view.storage_offset() - box.expert * math.prod(box.in_matrix.shape)
            return destination.copy_(matrix.as_strided(view.shape, view.stride(), first))

        return _Copies(self._tensors, replace)

    def _box(self, name: str, view: torch.Tensor) -> Box:
        """The box of one matrix that a view shows; the whole matrix if the view is no box of it."""
        whole = self._tensors[name]
        offset, start = view.storage_offset(), []
        for stride in whole.stride():
            start.append(offset // stride)
            offset %= stride
        stacked = max(whole.dim() - 2, 0)
        shape = view.shape
        if not self._is_box(name, view):
            start[stacked:], shape = (0,) * (whole.dim() - stacked), whole.shape[stacked:]
        return Box(start=tuple(start), shape=(1,) * stacked + tuple(shape))

    def _is_box(self, name: str, view: torch.Tensor) -> bool:
        """Whether a view is a box of one matrix; a transposed square is not, in spite of its shape."""
        strides = self._tensors[name].stride()[-2:]
        pairs = zip(view.shape, view.stride(), strides, strict=False)
        return view.dim() == len(strides) and all(size <= 1 or stride == whole for size, stride, whole in pairs)


def copy_box(source: BoxSource, name: str, box: Box, destination: torch.Tensor) -> None:
    """Copy a box of one matrix into memory of its shape, bucket by bucket."""
    if destination.dim() < 2:
        destination.copy_(source.read(name, box))
        return
    target = destination.view(box.shape)  # a box of a stack has three dimensions
    for common, view in source.views(name, box):
        target[common.slices(box.start)].copy_(view)
        del view  # so that its bucket is released before the next one is taken


def required_boxes(landings: Sequence[Landing]) -> dict[str, tuple[Box, ...]]:
    """Boxes of each tensor that a rank requires, in the form of `Required`."""
    required: dict[str, dict[Box, None]] = {}
    for landing in landings:
        required.setdefault(landing.name, {})[landing.box] = None
    return {name: tuple(boxes) for name, boxes in required.items()}


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts `copy_` out of stand-ins, which it recognises by their storage."""

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
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self._on_other(func._schema.is_mutable, given, result)
        return result


@contextmanager
def _in_checkpoint_layout(model: torch.nn.Module) -> Iterator[None]:
    """Put a model's parameters on the meta device, with vLLM's plain loaders; restore the old parameters afterwards."""
    absent = [(layer, name) for layer in model.modules() for name, value in layer._parameters.items() if value is None]
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
        for layer, name in absent:  # parameters that a kernel has packed and removed
            layer.register_parameter(name, None)
