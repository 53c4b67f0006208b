"""Reports of vLLM's layers, made by vLLM's own functions where they need no device."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope

from rollout.built_model import BuiltModel
from rollout.worker.model_report import built_model

HEAD_DIM = 32
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIG = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=True)))


class Part(torch.nn.Module):
    """A module with these parts, which need be no modules."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def attention(window):
    """A layer without a backend, which only an engine has."""
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.head_size, layer.sliding_window = HEAD_DIM, window
    return layer


def layer(rope, *, eps=1e-5, window=None):
    return Part(
        norm=RMSNorm(64, eps=eps),
        attn=attention(window),
        rotary=get_rope(HEAD_DIM, max_position=128, rope_parameters=rope, dtype=torch.float32),
    )


def model(*ropes, scale=1.0, **changes):
    with set_current_vllm_config(VllmConfig()):
        layers = torch.nn.ModuleList([layer(rope) for rope in ropes[1:]] + [layer(ropes[0], **changes)])
        return Part(layers=layers, logits_processor=LogitsProcessor(101, scale=scale))


def test_a_report_has_the_numbers_of_the_layers():
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert built_model(model(plain, plain), CONFIG) == BuiltModel(
        head_dim=HEAD_DIM,
        rotary_dim=HEAD_DIM,
        rope_type="default",
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        sliding_window=None,
        logit_scale=1.0,
        tie_word_embeddings=True,
    )
    found = built_model(model(LLAMA3, scale=0.5, eps=1e-5, window=None), CONFIG)
    assert (found.rope_type, found.rope_theta, found.rope_scaling) == ("llama3", 500000.0, (8.0, 1.0, 4.0, 64))
    assert found.logit_scale == 0.5


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"partial_rotary_factor": 0.5}, "rotary_dim", 16),
        ({"rope_type": "linear", "factor": 2.0}, "rope_type", "LinearScalingRotaryEmbedding"),
        ({"mrope_section": [8, 4, 4]}, "rope_type", "MRotaryEmbedding"),
    ],
)
def test_other_rotary_embeddings_show(changes, name, value):
    rope = {"rope_type": "default", "rope_theta": 10000.0} | changes
    assert getattr(built_model(model(rope), CONFIG), name) == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps": 1e-6}, "differ in rms_norm_eps: 1e-05 and 1e-06"),
        ({"window": 4096}, "differ in sliding_window: None and 4096"),
    ],
)
def test_layers_that_differ_are_refused(changes, message):
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(RuntimeError, match=message):
        built_model(model(rope, rope, **changes), CONFIG)


def test_a_model_of_other_layers_is_refused_naming_the_key():
    with pytest.raises(RuntimeError, match=r"Part has no RotaryEmbeddingBase.*remove engine\.vllm\.model_impl"):
        built_model(Part(norm=torch.nn.LayerNorm(4)), CONFIG)
