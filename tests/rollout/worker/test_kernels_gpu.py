"""Products in 8 bits on a CUDA device: vLLM's kernels against the products of the same codes in float64."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(1, 512, 256), (7, 1024, 512), (64, 4096, 3584), (300, 3584, 4608)]
"""Rows, columns of the activations, columns of the result: single tokens, ragged batches, layers of 7B."""
BF16_STEP = 2.0**-8
"""Largest rounding of a bfloat16 result, relative."""
INT32_SUM, FP8_SUM = 2.0**-20, 2.0**-11
"""Largest error of the sum, relative to the sum of magnitudes. Codes of INT8 are added exactly; tensor cores of Hopper
keep about 13 bits of a sum of FP8 products (DeepSeek-V3, section 3.3.2)."""


def draw(rows: int, columns: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(rows, 1, generator=generator) * 3 + 0.1  # every row has a scale of its own
    return (torch.randn(rows, columns, generator=generator) * scales).to("cuda", torch.bfloat16)


def assert_decoded(decoded: torch.Tensor, values: torch.Tensor) -> None:
    """Codes of FP8 stand for the values: 3 bits of mantissa, and fewer near zero."""
    error = (decoded - values.double()).abs()
    assert bool((error <= values.double().abs() * 2.0**-4 + values.abs().amax() * 2.0**-16).all())


def assert_product(found: torch.Tensor, activations: torch.Tensor, weight: torch.Tensor, *, sum_error: float) -> None:
    """`found` equals the product of the decoded values [rows, inner] and [columns, inner] in float64."""
    exact = activations @ weight.t()
    allowed = exact.abs() * BF16_STEP + activations.abs() @ weight.t().abs() * sum_error
    excess = ((found.double() - exact).abs() - allowed).max()
    assert float(excess) <= 0, float(excess)


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_int8_products_are_exact_up_to_the_rounding_of_the_result(rows, inner, columns):
    from vllm import _custom_ops as ops

    activations, weight = draw(rows, inner, seed=1), draw(columns, inner, seed=2)
    codes, scales, _ = ops.scaled_int8_quant(activations)
    weight_codes, weight_scales, _ = ops.scaled_int8_quant(weight)
    found = ops.cutlass_scaled_mm(codes, weight_codes.t(), scales, weight_scales.t(), torch.bfloat16)
    decoded, weight_decoded = codes.double() * scales.double(), weight_codes.double() * weight_scales.double()
    assert_product(found, decoded, weight_decoded, sum_error=INT32_SUM)
    assert bool((codes.abs().amax(dim=1) == 127).all())  # the whole range of the codes is used


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_fp8_products_with_a_scale_a_channel_are_exact_up_to_the_rounding_of_the_result(rows, inner, columns):
    from vllm import _custom_ops as ops

    activations, weight = draw(rows, inner, seed=3), draw(columns, inner, seed=4)
    codes, scales = ops.scaled_fp8_quant(activations, use_per_token_if_dynamic=True)
    weight_codes, weight_scales = ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True)
    found = ops.cutlass_scaled_mm(codes, weight_codes.t(), scales, weight_scales.t(), torch.bfloat16)
    decoded, weight_decoded = codes.double() * scales.double(), weight_codes.double() * weight_scales.double()
    assert_decoded(decoded, activations)
    assert_product(found, decoded, weight_decoded, sum_error=FP8_SUM)


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_fp8_products_with_a_scale_a_block_are_exact_up_to_the_rounding_of_the_result(rows, inner, columns):
    from vllm.model_executor.layers.quantization.utils.fp8_utils import (
        per_token_group_quant_fp8,
        w8a8_triton_block_scaled_mm,
    )

    activations, weight = draw(rows, inner, seed=5), draw(columns, inner, seed=6)
    codes, scales = per_token_group_quant_fp8(activations, 128)
    blocks = weight.float().reshape(columns // 128, 128, inner // 128, 128)
    weight_scales = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    weight_codes = (blocks / weight_scales[:, None, :, None]).to(torch.float8_e4m3fn)
    found = w8a8_triton_block_scaled_mm(
        codes, weight_codes.reshape(columns, inner), scales, weight_scales, [128, 128], output_dtype=torch.bfloat16
    )
    decoded = codes.double().reshape(rows, -1, 128) * scales.double()[:, :, None]
    weight_decoded = (weight_codes.double() * weight_scales.double()[:, None, :, None]).reshape(columns, inner)
    assert_decoded(decoded.reshape(rows, inner), activations)
    assert_decoded(weight_decoded, weight)
    assert_product(found, decoded.reshape(rows, inner), weight_decoded, sum_error=FP8_SUM)
