"""A publish loaded without vLLM's loaders: what they were seen to copy is copied.

Loaders are Python that vLLM runs twice for every tensor, first to count; a publish is hundreds of tensors. What a
layer needs besides (memory in checkpoint layout, repacking, its old storage back) is vLLM's still: each layer is
processed when its last tensor has come, as by `vllm.model_executor.model_loader.reload.layerwise`.
"""

import inspect
from collections.abc import Iterator, Sequence

import torch
from vllm.model_executor.model_loader.reload import layerwise

from rollout.weights.manifest import TensorSpec
from rollout.worker.loader_recording import Landing, Recording, Source, copy_part

Step = str | tuple[TensorSpec, ...]
"""A module whose tensors have come, or tensors for vLLM's loaders."""


def replayed(recording: Recording) -> frozenset[str]:
    """Modules that need no loader: plain ones that share no tensor with others."""
    modules = frozenset(recording.plain)
    while True:
        others = {landing.name for landing in recording.landings if landing.module not in modules}
        kept = modules - {landing.module for landing in recording.landings if landing.name in others}
        if kept == modules:
            return modules
        modules = kept


def steps(specs: Sequence[TensorSpec], recording: Recording) -> Iterator[Step]:
    """What to load when, in the order of a publish's tensors."""
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


def load(layer: torch.nn.Module, landings: Sequence[Landing], source: Source) -> None:
    """Copy all that lands in a layer that vLLM has put back into checkpoint layout, and let vLLM repack it."""
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


def _copy(param: torch.Tensor, landing: Landing, source: Source) -> None:
    """`param` is put in by vLLM, by this name, once it has memory."""
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        memory = param.detach().as_strided(landing.shape, landing.strides, landing.offset)
        copy_part(source, landing.name, landing.box, memory)


_COPY = inspect.signature(_copy)
