"""The table that pairs Hugging Face's tensor names with Megatron's, and says how each tensor is cut.

One `Rule` for each tensor (of each layer): both names, the split rule, the kind, the full shape, and when the tensor
exists. `megatron_rl.weights.shards` applies it. To support a tensor, add a row.

Split rules, for tensor-parallel rank r of n:

    REPLICATED   the whole tensor on every rank
    COLUMNS      columns cut into n equal boxes (the input dimension of a row-parallel layer)
    VOCAB        rows cut after padding to `ModelSpec.padded_vocab_size`; padding rows have no shard
    Q, K, V      rows of the fused `linear_qkv`, interleaved per query group: [q .. q, k, v] [q .. q, k, v]
    GATE, UP     rows of the fused `linear_fc1`: the rank's rows of gate above its rows of up

Pure: no torch, no megatron.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_rl.model.spec import ModelSpec


class Kind(enum.Enum):
    """Kind of a tensor; decides, for example, whether a format quantises it."""

    EMBEDDING = "embedding"
    OUTPUT = "output"
    LINEAR = "linear"
    """A matrix of a decoder layer."""
    ROUTER = "router"
    """Chooses experts. It is small, and its decisions must not be rounded."""
    BIAS = "bias"
    NORM = "norm"


class Split(enum.Enum):
    """How a tensor is cut over tensor-parallel ranks; see the file's docstring."""

    REPLICATED = "replicated"
    COLUMNS = "columns"
    VOCAB = "vocab"
    Q = "q"
    K = "k"
    V = "v"
    GATE = "gate"
    UP = "up"


class Where(enum.Enum):
    """Which pipeline stages hold a tensor."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table. In names, the first `{}` is the layer number and the second the number of an expert."""

    hf: str
    local: str
    te: str | None = None
    """Name in Transformer Engine's layers if it differs."""
    split: Split
    kind: Kind
    shape: Callable[[ModelSpec], tuple[int, ...]]
    """Full Hugging Face shape."""
    where: Where = Where.LAYER
    present: Callable[[ModelSpec], bool] = lambda spec: True
    per_expert: bool = False
    """Whether every expert of a layer has one."""
    tied_copy: bool = False
    """Whether it is the last stage's copy of the embedding, which the first stage owns."""


def _q_rows(spec: ModelSpec) -> int:
    return spec.num_heads * spec.head_dim


def _kv_rows(spec: ModelSpec) -> int:
    return spec.num_kv_heads * spec.head_dim


def _hidden(spec: ModelSpec) -> tuple[int, ...]:
    return (spec.hidden_size,)


def _head(spec: ModelSpec) -> tuple[int, ...]:
    return (spec.head_dim,)


def _vocab(spec: ModelSpec) -> tuple[int, ...]:
    return (spec.vocab_size, spec.hidden_size)


_HF_LAYER = "model.layers.{}."
_LAYER = "decoder.layers.{}."
_ATTENTION, _MLP = _LAYER + "self_attention.", _LAYER + "mlp."


def _is_dense(spec: ModelSpec) -> bool:
    return spec.experts is None


def _has_experts(spec: ModelSpec) -> bool:
    return spec.experts is not None


def _layer_norm(
    hf: str, local: str, te: str | None = None, present: Callable[[ModelSpec], bool] = lambda spec: True
) -> Rule:
    return Rule(
        hf=_HF_LAYER + hf,
        local=_LAYER + local,
        te=None if te is None else _LAYER + te,
        split=Split.REPLICATED,
        kind=Kind.NORM,
        shape=_hidden,
        present=present,
    )


def _qkv(letter: Literal["q", "k", "v"], rows: Callable[[ModelSpec], int]) -> tuple[Rule, Rule]:
    hf, megatron, split = f"{_HF_LAYER}self_attn.{letter}_proj.", _ATTENTION + "linear_qkv.", Split(letter)
    return (
        Rule(
            hf=hf + "weight",
            local=megatron + "weight",
            split=split,
            kind=Kind.LINEAR,
            shape=lambda spec: (rows(spec), spec.hidden_size),
        ),
        Rule(
            hf=hf + "bias",
            local=megatron + "bias",
            split=split,
            kind=Kind.BIAS,
            shape=lambda spec: (rows(spec),),
            present=lambda spec: spec.qkv_bias,
        ),
    )


def _qk_norm(letter: Literal["q", "k"]) -> Rule:
    return Rule(
        hf=f"{_HF_LAYER}self_attn.{letter}_norm.weight",
        local=f"{_ATTENTION}{letter}_layernorm.weight",
        split=Split.REPLICATED,
        kind=Kind.NORM,
        shape=_head,
        present=lambda spec: spec.qk_norm,
    )


def _feed_forward(hf: str, local: str, *, per_expert: bool) -> tuple[Rule, ...]:
    """The three matrices of a feed-forward network, or of each expert; Transformer Engine groups experts' matrices."""
    present = _has_experts if per_expert else _is_dense

    def fc1(half: Literal["gate", "up"]) -> Rule:
        return Rule(
            hf=f"{hf}{half}_proj.weight",
            local=local + "linear_fc1.weight",
            te=f"{_MLP}experts.linear_fc1.weight{{}}" if per_expert else None,
            split=Split(half),
            kind=Kind.LINEAR,
            shape=lambda spec: (spec.ffn_size, spec.hidden_size),
            present=present,
            per_expert=per_expert,
        )

    down = Rule(
        hf=hf + "down_proj.weight",
        local=local + "linear_fc2.weight",
        te=f"{_MLP}experts.linear_fc2.weight{{}}" if per_expert else None,
        split=Split.COLUMNS,
        kind=Kind.LINEAR,
        shape=lambda spec: (spec.hidden_size, spec.ffn_size),
        present=present,
        per_expert=per_expert,
    )
    return fc1("gate"), fc1("up"), down


def _num_experts(spec: ModelSpec) -> int:
    return 0 if spec.experts is None else spec.experts.count


TABLE: tuple[Rule, ...] = (
    Rule(
        hf="model.embed_tokens.weight",
        local="embedding.word_embeddings.weight",
        split=Split.VOCAB,
        kind=Kind.EMBEDDING,
        shape=_vocab,
        where=Where.FIRST,
    ),
    _layer_norm("input_layernorm.weight", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    *_qkv("q", _q_rows),
    *_qkv("k", _kv_rows),
    *_qkv("v", _kv_rows),
    _qk_norm("q"),
    _qk_norm("k"),
    Rule(
        hf=_HF_LAYER + "self_attn.o_proj.weight",
        local=_ATTENTION + "linear_proj.weight",
        split=Split.COLUMNS,
        kind=Kind.LINEAR,
        shape=lambda spec: (spec.hidden_size, _q_rows(spec)),
    ),
    _layer_norm(
        "post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", _is_dense
    ),
    _layer_norm("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", present=_has_experts),
    *_feed_forward(_HF_LAYER + "mlp.", _MLP, per_expert=False),
    Rule(
        hf=_HF_LAYER + "mlp.gate.weight",
        local=_MLP + "router.weight",
        split=Split.REPLICATED,
        kind=Kind.ROUTER,
        shape=lambda spec: (_num_experts(spec), spec.hidden_size),
        present=_has_experts,
    ),
    *_feed_forward(_HF_LAYER + "mlp.experts.{}.", _MLP + "experts.local_experts.{}.", per_expert=True),
    Rule(
        hf="model.norm.weight",
        local="decoder.final_layernorm.weight",
        split=Split.REPLICATED,
        kind=Kind.NORM,
        shape=_hidden,
        where=Where.LAST,
    ),
    Rule(
        hf="lm_head.weight",
        local="output_layer.weight",
        split=Split.VOCAB,
        kind=Kind.OUTPUT,
        shape=_vocab,
        where=Where.LAST,
        present=lambda spec: not spec.tied,
    ),
    Rule(
        hf="model.embed_tokens.weight",
        local="output_layer.weight",
        split=Split.VOCAB,
        kind=Kind.EMBEDDING,
        shape=_vocab,
        where=Where.LAST,
        present=lambda spec: spec.tied,
        tied_copy=True,
    ),
)
