"""INT8 codes and scales against numpy, loops against torch, and the shard rule that lets ranks quantise slices."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.cpu import code_loops
from megatron_rl.quantization import formats, fp8


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
    rule = formats.CODE_FORMATS[name]
    with pytest.raises(ValueError, match=r"1 of \d scales would be of non-finite"):
        rule.factors(rule.amax(weight, (0, 0)))


@pytest.mark.parametrize("most_threads", [0, code_loops.MOST_THREADS], ids=["by torch", "by loops"])
def test_the_magnitude_of_a_row_is_that_of_its_numbers_whatever_they_are(
    monkeypatch: pytest.MonkeyPatch, most_threads: int
) -> None:
    monkeypatch.setattr(code_loops, "MOST_THREADS", most_threads)
    rows = torch.randn(40, 33, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows[0], rows[1, 3], rows[2, 4], rows[3] = 0.0, float("inf"), float("-inf"), -0.0
    rows[4, 5:7] = torch.tensor([1e-40, -9e-41])  # subnormal
    for some in (rows, rows[:, 3:30], rows.t()):
        assert torch.equal(formats.row_amax(some), some.float().abs().amax(1, keepdim=True))
    rows[5, 6], rows[6, 7] = float("nan"), -float("nan")
    assert formats.row_amax(rows).isnan().view(-1).nonzero().view(-1).tolist() == [5, 6]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(formats.CODE_FORMATS)),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    start=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    seed=st.integers(0, 2**31),
    is_cut=st.booleans(),
)
def test_compiled_loops_make_what_torch_makes(
    name: str, shape: tuple[int, int], start: tuple[int, int], seed: int, is_cut: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    wide = torch.randn(rows, 2 * columns, generator=generator)
    wide *= torch.randn(rows, 1, generator=generator).mul(6).exp2()
    wide[:, ::7] *= 2.0**-12  # of codes below the smallest normal number
    wide[rows // 2] = 0.0
    weight = wide.bfloat16()[:, columns // 2 :][:, :columns] if is_cut else wide.bfloat16()[:, :columns].contiguous()
    rule = formats.CODE_FORMATS[name]
    amax = rule.amax(weight, start)
    with patch.object(code_loops, "MOST_THREADS", 0):
        assert torch.equal(amax, rule.amax(weight, start))
    amax = amax * (1 + torch.rand(amax.shape, generator=generator)).bfloat16().float()  # of other ranks
    factors = rule.factors(amax)
    scales, found = rule.scales(factors), []
    for most_threads in (torch.get_num_threads(), 0):
        with patch.object(code_loops, "MOST_THREADS", most_threads):
            assert code_loops.takes(weight) == bool(most_threads)
            codes = rule.codes(weight, factors, start)
            given = torch.zeros_like(codes)
            assert rule.codes(weight, factors, start, given) is given
            assert torch.equal(given.view(torch.uint8), codes.view(torch.uint8))
            found.append((codes.view(torch.uint8), rule.values(codes, scales, start)))
    (codes, values), (torchs_codes, torchs_values) = found
    assert torch.equal(codes, torchs_codes) and torch.equal(values, torchs_values)


def test_compiled_loops_round_every_number_as_torch_does() -> None:
    """All of BF16's finite numbers times 1; all that lie halfway between codes are among them."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    weight = bits.view(torch.bfloat16)
    weight = weight[weight.isfinite()].view(2, -1)
    ones = torch.ones(2, 1)
    for loops, torchs in (
        (code_loops.e4m3_of(weight, ones, None), fp8.fp8_channel_codes(weight.float(), ones)),
        (code_loops.int8_of(weight, ones), formats.int8_codes(weight.float(), ones)),
    ):
        assert torch.equal(loops.view(torch.uint8), torchs.view(torch.uint8))
