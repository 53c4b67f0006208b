"""FP8 codes equal Transformer Engine's reference and a naive rule per block; slices have the same codes."""

import itertools
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.quantization.formats import CODE_FORMATS, channel_values
from megatron_rl.quantization.fp8 import (
    BLOCK,
    block_amax,
    fp8_block_codes,
    fp8_block_values,
    fp8_channel_codes,
    fp8_scale,
)

VECTORS = Path(__file__).parents[2] / "data" / "fp8_block.npz"
"""Made by `tests/data/make_fp8_block.py` with the reference of transformer_engine's tests."""


def weights(shape: tuple[int, int], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Weights whose magnitudes span many powers of two, also between blocks."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape, generator=generator).mul(2).exp2()
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("name", sorted(np.load(VECTORS)["names"]))
@pytest.mark.parametrize("power_of_two", [True, False])
def test_codes_and_scales_of_blocks_equal_transformer_engines_bytes(name: str, power_of_two: bool) -> None:
    vectors = np.load(VECTORS)
    weight = torch.from_numpy(vectors[f"{name}/weight"])
    weight = weight.view(torch.bfloat16) if weight.dtype == torch.int16 else weight
    scale = fp8_scale(block_amax(weight), power_of_two=power_of_two, dtype=weight.dtype)
    kind = "power" if power_of_two else "exact"
    assert np.array_equal(fp8_block_codes(weight, scale).view(torch.uint8).numpy(), vectors[f"{name}/{kind}/codes"])
    assert np.array_equal((1 / scale).numpy().view(np.int32), vectors[f"{name}/{kind}/inverse"].view(np.int32))


def test_rows_equal_the_naive_rule() -> None:
    weight = weights((9, 70), 0)
    weight[3] = 0
    weight[4] = 1e-38
    scale = fp8_scale(weight.float().abs().amax(dim=1, keepdim=True), power_of_two=False, dtype=weight.dtype)
    codes = fp8_channel_codes(weight, scale)
    for row, values in enumerate(weight.float().tolist()):
        largest = max(map(abs, values))
        expected = np.float32(1.0 if largest == 0 else min(448 / largest, torch.finfo(torch.bfloat16).max))
        assert scale[row, 0].item() == expected
        nearest = [e4m3(float(np.float32(value) * expected)) for value in values]
        assert codes[row].float().tolist() == nearest
    inverse = (1 / scale).numpy()
    assert np.array_equal(channel_values(codes, torch.from_numpy(inverse)).numpy(), codes.float().numpy() * inverse)


def e4m3(value: float) -> float:
    """Nearest number with three bits of mantissa, ties to even, saturating at 448."""
    if value == 0:
        return value
    exponent = max(math.floor(math.log2(abs(value))), -6)
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(abs(value) / step) * step, 448.0), value)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 1 << 20), st.booleans(), st.data())
def test_a_slice_has_the_codes_of_the_whole_matrix(
    num_rows: int, num_columns: int, seed: int, power_of_two: bool, data: st.DataObject
) -> None:
    whole = weights((num_rows, num_columns), seed)
    amax = block_amax(whole)
    scale = fp8_scale(amax, power_of_two=power_of_two, dtype=whole.dtype)
    codes = fp8_block_codes(whole, scale)
    cut = sorted(data.draw(st.lists(st.integers(0, num_columns), max_size=3)))
    merged = torch.zeros_like(amax)
    borders = [0, *cut, num_columns]
    pieces = [(a, whole[:, a:b]) for a, b in itertools.pairwise(borders) if b > a]
    for first, piece in pieces:
        own = block_amax(piece, (0, first))
        at = slice(first // BLOCK, first // BLOCK + own.shape[1])
        merged[:, at] = torch.maximum(merged[:, at], own)
    assert torch.equal(merged, amax)
    for first, piece in pieces:
        of_piece = scale[:, first // BLOCK : (first + piece.shape[1] - 1) // BLOCK + 1]
        found = fp8_block_codes(piece, of_piece, (0, first))
        assert torch.equal(found.view(torch.uint8), codes[:, first : first + piece.shape[1]].view(torch.uint8))


def test_values_are_within_a_sixteenth_of_the_weights() -> None:
    weight = weights((200, 300), 3, torch.float32)
    for power_of_two in (True, False):
        scale = fp8_scale(block_amax(weight), power_of_two=power_of_two, dtype=weight.dtype)
        values = fp8_block_values(fp8_block_codes(weight, scale), 1 / scale)
        normal = weight.abs() * scale.repeat_interleave(BLOCK, 0)[:200].repeat_interleave(BLOCK, 1)[:, :300] > 2**-6
        assert ((values - weight).abs()[normal] <= weight.abs()[normal] / 16 * 1.0001).all()


def test_power_of_two_scales_are_powers_of_two_at_most_half_as_large() -> None:
    amax = torch.from_numpy(np.random.default_rng(0).lognormal(0, 10, 5000).astype(np.float32))
    exact, power = (fp8_scale(amax, power_of_two=flag, dtype=torch.float32) for flag in (False, True))
    assert all(struct.unpack("I", struct.pack("f", value))[0] & 0x7FFFFF == 0 for value in power.tolist())
    assert ((power <= exact) & (exact < 2 * power)).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = weights((130, 130), 1)
    weight[129, 0] = value
    with pytest.raises(ValueError, match="1 of 4 scales"):
        CODE_FORMATS["fp8_block"].factors(block_amax(weight))
