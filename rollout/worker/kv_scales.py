"""Scales of keys and values in FP8: each layer takes them from what a forward of the probe prompt writes to the cache.

A code is e4m3(x / scale), with one scale for the keys and one for the values of a layer on a rank. e4m3 is a float: its
precision is the same over many octaves, so a scale only has to keep numbers within its range. A layer sets its scales
right before it writes, so later layers see codes of the new scales. Hence one forward suffices, and the scales
depend on weights and prompt alone, not on earlier scales.

Scales must not change while codes of earlier scales are in use. So they change after an update only, when the engine
has dropped all keys and values (`publish.in_flight` = keep_kv is refused).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

E4M3_MAX: Final = 448.0

HEADROOM: Final = 4.0
"""How many times the largest number of the probe prompt has a code; larger numbers are cut to it.

A prompt of random tokens is not what the engine will sample. Rotary embeddings alone enlarge a key's largest entry by
up to 1.42 at other positions. The room costs no precision: codes of 2^-12 of the largest number still have all bits."""

FOLLOW: Final = ("CPUAttentionBackendImpl", "FlashAttentionImpl", "TritonAttentionImpl")
"""Backends of attention that read a layer's scales in every forward. FlashInfer keeps those that it has read first."""


def is_fp8(config: VllmConfig) -> bool:
    """Whether keys and values are FP8 codes."""
    return str(config.cache_config.cache_dtype).startswith("fp8")


def attention_layers(config: VllmConfig) -> dict[str, Attention]:
    """The layers of this rank with a cache, by name.

    Raises:
        RuntimeError: a layer's backend would not follow a change of scales.
    """
    layers = config.compilation_config.static_forward_context.items()
    found = {name: layer for name, layer in layers if isinstance(layer, AttentionLayerBase)}
    for name, layer in found.items():
        backend = type(getattr(layer, "impl", layer)).__name__
        if backend not in FOLLOW:
            raise RuntimeError(
                f"engine.kv_format fp8: {name} computes attention by {backend}, which is not known to follow a change "
                "of scales; set engine.vllm.attention_backend to FLASH_ATTN (GPUs of capability 9.0) or TRITON_ATTN"
            )
    return found


@contextmanager
def setting_scales(layers: Mapping[str, Attention]) -> Iterator[None]:
    """Let each layer set its scales by what the forward inside of the context writes.

    Raises:
        RuntimeError: a layer wrote nothing, because a CUDA graph had its write.
    """
    missing = set(layers)
    for name, layer in layers.items():
        layer.impl.do_kv_cache_update = _after_setting(name, layer.impl.do_kv_cache_update, missing)
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.impl.do_kv_cache_update  # the method of the class is there again
    if missing:
        raise RuntimeError(
            f"engine.kv_format fp8: {', '.join(sorted(missing))} wrote no keys and values of the probe prompt outside "
            "of CUDA graphs; raise publish.probe_tokens, or set engine.vllm.enforce_eager"
        )


def _after_setting(name: str, update: Callable[..., None], missing: set[str]) -> Callable[..., None]:
    def set_and_update(
        layer: Attention, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        written = slots >= 0  # further rows pad the forward to the size of a graph and hold anything
        set_scales(layer, key=_largest(key, written), value=_largest(value, written))
        missing.discard(name)
        update(layer, key, value, cache, slots)

    return set_and_update


def _largest(numbers: torch.Tensor, written: torch.Tensor) -> float:
    """Largest absolute number [rows, heads, size] of the rows that are written."""
    return float(numbers[: len(written)].abs().masked_fill(~written.view(-1, 1, 1), 0).amax())


def set_scales(layer: Attention, *, key: float, value: float) -> None:
    """Set both scales of a layer for numbers of up to `HEADROOM` times these.

    Queries become codes at a scale of 1. An engine that starts without weights has random numbers in every buffer of
    its model, also in this one (vLLM 0.25.1: `initialize_dummy_weights`).
    """
    for side in ("q", "prob"):
        getattr(layer, f"_{side}_scale").fill_(1.0)
        setattr(layer, f"_{side}_scale_float", 1.0)
    for side, largest in (("k", key), ("v", value)):
        scale = max(largest, torch.finfo(torch.float32).tiny) * HEADROOM / E4M3_MAX
        getattr(layer, f"_{side}_scale").fill_(scale)  # in place, because kernels of captured graphs read it
        setattr(layer, f"_{side}_scale_float", scale)


def scales(layers: Mapping[str, Attention]) -> list[list[object]]:
    """[layer, key scale, value scale] of each layer."""
    return [[name, layer._k_scale_float, layer._v_scale_float] for name, layer in layers.items()]
