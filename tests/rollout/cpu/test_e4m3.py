"""Every e4m3 code decodes to the BF16 number that torch's cast gives."""

import pytest
import torch

from rollout.cpu.e4m3 import e4m3_numbers, e4m3_scaled

EVERY_CODE = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)


def bits(numbers: torch.Tensor) -> torch.Tensor:
    """Bit patterns, so that signed zeros differ; all NaNs get the same pattern."""
    return torch.where(numbers.isnan(), torch.nan, numbers).view(torch.int16)


@pytest.mark.parametrize("times", [1, 700])
def test_every_code_decodes_to_the_number_that_a_cast_gives(times: int) -> None:
    codes = EVERY_CODE.repeat(times)
    found = e4m3_numbers(codes)
    assert found.isnan().sum() == 2 * times  # 0x7f and 0xff
    assert torch.equal(bits(found), bits(codes.to(torch.bfloat16)))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (300, 401), (7, 30, 40)])
def test_decoded_shapes_and_strides_equal_those_of_a_cast(shape: tuple[int, ...]) -> None:
    codes = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    for one in (codes, codes.t()) if len(shape) == 2 else (codes,):
        found, expected = e4m3_numbers(one), one.to(torch.bfloat16)
        assert torch.equal(found, expected) and found.shape == expected.shape
        assert found.stride() == expected.stride() or not found.numel()


def test_a_slice_of_a_matrix_is_decoded_without_the_rest() -> None:
    codes = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    for part in (codes[3:40, 5:50], codes[:, ::2], codes.t()[10:20]):
        assert torch.equal(e4m3_numbers(part), part.to(torch.bfloat16))


@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (300, 401), (0, 7)])
@pytest.mark.parametrize("exact", [True, False], ids=["powers of two", "any scales"])
def test_codes_times_scales_are_rounded_once_as_in_torch(shape: tuple[int, int], exact: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(256, shape, generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
    grid = torch.randn([-(-size // 128) for size in shape], generator=generator).mul(9).exp2()
    grid = grid.log2().round().exp2() if exact else grid
    spread = grid.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    expected = (codes.float() * spread).to(torch.bfloat16)
    assert torch.equal(bits(e4m3_scaled(codes, grid)), bits(expected))


def test_the_memory_of_a_decoded_weight_can_be_released() -> None:
    codes = EVERY_CODE.clone()
    for one in (e4m3_numbers(codes), codes):
        one.untyped_storage().resize_(0)
        assert one.untyped_storage().nbytes() == 0
