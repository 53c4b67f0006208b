"""Loads a publish without vLLM's loaders, by repeating the copies that were recorded.

vLLM's loaders are Python code that vLLM runs twice for every tensor, first to count elements, and a publish has
hundreds of tensors. vLLM still does everything else that a layer needs: memory in checkpoint layout, repacking, and its
old storage back. Each layer is processed when its last tensor has arrived, as in
`vllm.model_executor.model_loader.reload.layerwise`.
"""

import inspect
from collections.abc import Iterator, Sequence

import torch
from vllm.model_executor.model_loader.reload import layerwise

from rollout.weights.manifest import TensorSpec
from rollout.worker.loader_recording import BoxSource, Landing, Recording, copy_box

Step = str | tuple[TensorSpec, ...]
"""A module whose tensors have all arrived, or tensors for vLLM's loaders."""


def replayed(recording: Recording) -> frozenset[str]:
    """Modules that need no loader: plain modules that share no tensor with a module that does."""
    modules = frozenset(recording.plain)
    while True:
        others = {landing.name for landing in recording.landings if landing.module not in modules}
        remaining = modules - {landing.module for landing in recording.landings if landing.name in others}
        if remaining == modules:
            return modules
        modules = remaining


def steps(specs: Sequence[TensorSpec], recording: Recording) -> Iterator[Step]:
    """Steps of loading, in the order of a publish's tensors."""
    modules = replayed(recording)
    homes: dict[str, set[str]] = {}
    missing: dict[str, set[str]] = {}
    for landing in recording.landings:
        if landing.module in modules:
            homes.setdefault(landing.name, set()).add(landing.module)
            missing.setdefault(landing.module, set()).add(landing.name)
    for_loaders: list[TensorSpec] = []
    for spec in specs:
        if spec.name not in homes:
            for_loaders.append(spec)
            continue
        if for_loaders:
            yield tuple(for_loaders)
            for_loaders.clear()
        for module in sorted(homes[spec.name]):
            missing[module].discard(spec.name)
            if not missing[module]:
                yield module
    if for_loaders:
        yield tuple(for_loaders)


def load(layer: torch.nn.Module, landings: Sequence[Landing], source: BoxSource) -> None:
    """Copy every box of a layer that vLLM has put back into checkpoint layout, and let vLLM repack the layer."""
    info = layerwise.get_layerwise_info(layer)
    loaders = []
    for landing in landings:
        parameter = getattr(layer, landing.parameter)
        loaders.append((parameter, parameter.weight_loader))
        parameter.weight_loader = _copy
        info.loaded_weights.append((landing.parameter, _COPY.bind(parameter, landing, source)))
    try:
        layerwise._layerwise_process(layer, info)
    finally:
        for parameter, loader in reversed(loaders):
            parameter.weight_loader = loader


def _copy(param: torch.Tensor, landing: Landing, source: BoxSource) -> None:
    """Copy one box; vLLM passes `param` by this name as soon as it has memory."""
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        memory = param.detach().as_strided(landing.shape, landing.strides, landing.offset)
        copy_box(source, landing.name, landing.box, memory)


_COPY = inspect.signature(_copy)
