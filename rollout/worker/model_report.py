"""Reads from the layers that vLLM has built what no tensor's shape shows: rotary embeddings, norms, attention, logits.

The report comes from layers, not from `config.json`: vLLM has defaults of its own and honours keys that others ignore.
Only `tie_word_embeddings` is taken from vLLM's configuration, because some kernels repack a tied output layer.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding

from rollout.built_model import BuiltModel

Value = TypeVar("Value")
Layer = TypeVar("Layer", bound=torch.nn.Module)

_ROPE_TYPES: dict[type[RotaryEmbeddingBase], str] = {RotaryEmbedding: "default", Llama3RotaryEmbedding: "llama3"}


def built_model(model: torch.nn.Module, config: VllmConfig) -> BuiltModel:
    """The report of a built model; `config` is the one that it was built from.

    Raises:
        RuntimeError: the model has no layer of a kind, or its layers differ.
    """
    ropes, attentions = _layers(model, RotaryEmbeddingBase), _layers(model, Attention)
    return BuiltModel(
        head_dim=_same("head_dim", (layer.head_size for layer in attentions)),
        rotary_dim=_same("rotary_dim", (layer.rotary_dim for layer in ropes)),
        rope_type=_same("rope_type", (_ROPE_TYPES.get(type(layer), type(layer).__name__) for layer in ropes)),
        rope_theta=_same("rope_theta", (float(layer.base) for layer in ropes)),
        rope_scaling=_same("rope_scaling", map(_scaling, ropes)),
        rms_norm_eps=_same("rms_norm_eps", (float(layer.variance_epsilon) for layer in _layers(model, RMSNorm))),
        sliding_window=_same("sliding_window", (layer.sliding_window for layer in attentions)),
        logit_scale=_same("logit_scale", (float(layer.scale) for layer in _layers(model, LogitsProcessor))),
        tie_word_embeddings=bool(config.model_config.hf_text_config.tie_word_embeddings),
    )


def _layers(model: torch.nn.Module, kind: type[Layer]) -> list[Layer]:
    found = [layer for layer in model.modules() if isinstance(layer, kind)]
    if not found:
        raise RuntimeError(
            f"vLLM's {type(model).__name__} has no {kind.__name__}, so nothing shows that it computes what the trainer "
            "does; needs vLLM's own model of this family: remove engine.vllm.model_impl"
        )
    return found


def _same(name: str, values: Iterable[Value]) -> Value:
    """The value that all layers have."""
    first, *others = dict.fromkeys(values)
    if others:
        raise RuntimeError(f"layers of vLLM's model differ in {name}: {first!r} and {others[0]!r}; needs one value")
    return first


def _scaling(layer: RotaryEmbeddingBase) -> tuple[float, float, float, int] | None:
    if not isinstance(layer, Llama3RotaryEmbedding):
        return None
    low, high = float(layer.low_freq_factor), float(layer.high_freq_factor)
    return float(layer.scaling_factor), low, high, int(layer.orig_max_position)
