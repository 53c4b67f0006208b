"""Descriptions of Qwen models for tests that need no files of a model."""

from dataclasses import replace

from megatron_rl.model.spec import ModelSpec

_QWEN3 = ModelSpec(
    family="qwen3",
    num_layers=3,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    ffn_size=48,
    vocab_size=101,
    rope_theta=1e4,
    rope_scaling=None,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    rms_eps=1e-6,
    max_positions=128,
)


def qwen_spec(**changes: object) -> ModelSpec:
    """A tiny dense Qwen3 of three layers, with these fields of `ModelSpec` changed."""
    return replace(_QWEN3, **changes)
