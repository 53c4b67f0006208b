"""INT8 codes and scales against numpy, and the shard rule that lets ranks quantise slices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.quantization import formats
from megatron_rl.quantization.backends import Quantizer, TorchBackend


def naive_int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / np.float32(127)
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 9), cols=st.integers(1, 17), seed=st.integers(0, 2**31), exponent=st.integers(-30, 10))
def test_int8_codes_equal_a_naive_numpy_quantiser(rows: int, cols: int, seed: int, exponent: int) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scale = naive_int8(weight.numpy())
    ours = formats.int8_scale(formats.row_amax(weight))
    np.testing.assert_array_equal(ours.numpy(), scale)
    np.testing.assert_array_equal(formats.int8_codes(weight, ours).numpy(), codes)


def test_codes_of_a_column_slice_equal_the_slice_of_the_whole_tensors_codes() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = formats.int8_codes(weight, formats.int8_scale(formats.row_amax(weight)))
    halves = weight.split(48, dim=1)
    amax = torch.maximum(*(formats.row_amax(half) for half in halves))
    scale = formats.int8_scale(amax)
    assert torch.equal(torch.cat([formats.int8_codes(half, scale) for half in halves], dim=1), whole)


def test_the_rounding_error_is_at_most_half_a_step_of_each_row() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    scale = formats.int8_scale(formats.row_amax(weight))
    values = formats.channel_values(formats.int8_codes(weight, scale), scale)
    assert bool(((values - weight).abs() <= scale * 0.5000001).all())


def test_a_row_of_zeros_keeps_a_positive_scale_and_zero_codes() -> None:
    weight = torch.zeros(2, 8)
    scale = formats.int8_scale(formats.row_amax(weight))
    assert bool((scale > 0).all())
    assert not formats.int8_codes(weight, scale).any()


@pytest.mark.parametrize("name", formats.CODE_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(bad: float, name: str) -> None:
    weight = torch.ones(4, 8)
    weight[2, 3] = bad
    rule = Quantizer(format=formats.CODE_FORMATS[name], backend=TorchBackend())
    with pytest.raises(ValueError, match=r"1 of \d scales belong to weights that are not finite"):
        rule.factors(rule.amax(weight, (0, 0)))
