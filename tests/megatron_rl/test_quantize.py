"""INT8 codes and scales against numpy, and the shard rule that lets every rank quantise its own slice."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.weights import quantize


def naive_int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / np.float32(127)
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 9), cols=st.integers(1, 17), seed=st.integers(0, 2**31), exponent=st.integers(-30, 10))
def test_int8_codes_equal_a_naive_numpy_quantiser(rows: int, cols: int, seed: int, exponent: int) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scale = naive_int8(weight.numpy())
    ours = quantize.int8_scale(quantize.row_amax(weight))
    np.testing.assert_array_equal(ours.numpy(), scale)
    np.testing.assert_array_equal(quantize.int8_codes(weight, ours).numpy(), codes)


def test_codes_of_a_column_slice_equal_the_slice_of_the_whole_tensors_codes() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = quantize.int8_codes(weight, quantize.int8_scale(quantize.row_amax(weight)))
    halves = weight.split(48, dim=1)
    amax = torch.maximum(*(quantize.row_amax(half) for half in halves))
    scale = quantize.int8_scale(amax)
    assert torch.equal(torch.cat([quantize.int8_codes(half, scale) for half in halves], dim=1), whole)


def test_the_rounding_error_is_at_most_half_a_step_of_each_row() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    scale = quantize.int8_scale(quantize.row_amax(weight))
    values = quantize.channel_values(quantize.int8_codes(weight, scale), scale)
    assert bool(((values - weight).abs() <= scale * 0.5000001).all())


def test_a_row_of_zeros_keeps_a_positive_scale_and_zero_codes() -> None:
    weight = torch.zeros(2, 8)
    scale = quantize.int8_scale(quantize.row_amax(weight))
    assert bool((scale > 0).all())
    assert not quantize.int8_codes(weight, scale).any()


@pytest.mark.parametrize("name", quantize.CODE_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(bad: float, name: str) -> None:
    weight = torch.ones(4, 8)
    weight[2, 3] = bad
    rule = quantize.CODE_FORMATS[name]
    with pytest.raises(ValueError, match=r"1 of \d scales would be of non-finite"):
        rule.scales(rule.amax(weight, (0, 0)))


def test_the_magnitude_of_a_row_is_that_of_its_numbers_whatever_they_are() -> None:
    rows = torch.randn(40, 33, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows[0], rows[1, 3], rows[2, 4], rows[3] = 0.0, float("inf"), float("-inf"), -0.0
    rows[4, 5:7] = torch.tensor([1e-40, -9e-41])  # subnormal
    for some in (rows, rows[:, 3:30], rows.t()):
        assert torch.equal(quantize.row_amax(some), some.float().abs().amax(1, keepdim=True))
    rows[5, 6], rows[6, 7] = float("nan"), -float("nan")
    assert quantize.row_amax(rows).isnan().view(-1).nonzero().view(-1).tolist() == [5, 6]
