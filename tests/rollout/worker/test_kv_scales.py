"""Scales of keys and values in FP8: what a layer takes them from, and which backends of attention are refused.

`tests/rollout/engine/test_kv_format.py` compares the scales of a real engine with Hugging Face.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from rollout.worker import kv_scales


class CPUAttentionBackendImpl:
    """Records the scales that a write would have used."""

    def __init__(self) -> None:
        self.written: list[tuple[float, float]] = []

    def do_kv_cache_update(self, layer, key, value, cache, slots) -> None:
        self.written.append((layer._k_scale_float, layer._v_scale_float))


class FlashInferImpl(CPUAttentionBackendImpl):
    pass


class Layer(AttentionLayerBase):
    def __init__(self, backend=CPUAttentionBackendImpl) -> None:
        self.impl = backend()
        self._k_scale, self._v_scale = torch.tensor(1.0), torch.tensor(1.0)
        self._k_scale_float = self._v_scale_float = 1.0
        self._q_scale, self._prob_scale = torch.tensor(-3e-4), torch.tensor(2e-4)  # as vLLM's dummy weights leave them

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: list[int]) -> None:
        self.impl.do_kv_cache_update(self, key, value, torch.zeros(0), torch.tensor(slots))

    get_attn_backend = get_kv_cache_spec = None


def config(**layers: object) -> SimpleNamespace:
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def test_a_layer_writes_with_the_scales_of_what_it_writes_and_keeps_them_afterwards():
    layer = Layer()
    key, value = torch.full((4, 2, 8), 0.5), torch.full((4, 2, 8), 0.25)
    key[1, 1, 3], value[0, 0, 7] = -7.0, 3.5
    key[2:], value[2:] = 1e9, -1e9  # a row without a slot, and a row beyond the slots: padding
    with kv_scales.setting_scales({"a": layer}):
        layer.write(key, value, slots=[32, 33, -1])
    expected = 7.0 * 4 / 448, 3.5 * 4 / 448
    assert layer.impl.written == [pytest.approx(expected)]
    assert (float(layer._k_scale), float(layer._v_scale)) == pytest.approx(expected)
    assert (float(layer._q_scale), float(layer._prob_scale)) == (1.0, 1.0)
    assert (layer._q_scale_float, layer._prob_scale_float) == (1.0, 1.0)
    layer.write(10 * key, value, slots=[32, 33, -1])
    assert layer.impl.written[1] == layer.impl.written[0]


def test_a_layer_whose_write_was_not_seen_is_named():
    seen, unseen = Layer(), Layer()
    with (
        pytest.raises(RuntimeError, match=r"kv_format fp8: b wrote no keys .* raise publish.probe_tokens"),
        kv_scales.setting_scales({"a": seen, "b": unseen}),
    ):
        seen.write(torch.ones(1, 1, 8), torch.zeros(1, 1, 8), slots=[0])
    assert seen._v_scale_float > 0  # values of zero alone have a scale, too


def test_a_backend_that_keeps_the_first_scales_is_refused():
    found = kv_scales.attention_layers(config(a=Layer(), experts=torch.nn.Linear(1, 1)))
    assert list(found) == ["a"]
    with pytest.raises(RuntimeError, match=r"b computes attention by FlashInferImpl.*TRITON_ATTN"):
        kv_scales.attention_layers(config(a=Layer(), b=Layer(FlashInferImpl)))
