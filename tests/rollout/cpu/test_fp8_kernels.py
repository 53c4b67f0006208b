"""Emulated FP8 products equal float64 products whose codes and scales follow the rules of the GPU kernels."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)

from rollout.cpu import fp8_kernels

ROUNDING = 2**-7
"""Of BF16, a few times over, of the size of the sum."""


def e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rounds to e4m3 codes and decodes them, in float64."""
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()


@pytest.fixture(autouse=True)
def registered():
    fp8_kernels.register()
    fp8_kernels.register()
    with set_current_vllm_config(VllmConfig()):
        yield


def kernel_of(weight_key, activation_key, shape):
    return init_fp8_linear_kernel(
        activation_quant_key=activation_key,
        weight_quant_key=weight_key,
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
        weight_shape=shape,
    )


def test_every_channel_and_every_token_has_a_scale() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(48, 80), torch.randn(5, 80).to(torch.bfloat16)
    scale = weight.abs().amax(1, keepdim=True) / 448
    kernel = kernel_of(kFp8StaticChannelSym, kFp8DynamicTokenSym, (48, 80))
    assert type(kernel) is fp8_kernels.EmulatedFp8Channel
    layer = torch.nn.Module()
    # as the scheme of compressed-tensors leaves them: [K, N]
    layer.weight = torch.nn.Parameter((weight / scale).to(torch.float8_e4m3fn).t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    kernel.process_weights_after_loading(layer)
    bias = torch.randn(48).to(torch.bfloat16)
    found = kernel.apply_weights(layer, inputs, bias)
    x = e4m3(inputs.float(), inputs.float().abs().amax(1, keepdim=True) / 448)
    expected = x @ e4m3(weight, scale).t() + bias.double()
    assert found.dtype == torch.bfloat16
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < ROUNDING


@pytest.mark.parametrize("factor", [1.0, 0.7])
def test_every_block_and_every_group_of_inputs_has_a_scale(factor: float) -> None:
    """Scales are powers of two, and numbers that BF16 cannot represent."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(200, 256), torch.randn(5, 256).to(torch.bfloat16)
    weight[:128] *= 100  # scales that differ
    inputs[:, 128:] *= 50
    scale = factor * torch.tensor([[0.5, 1.0], [0.0078125, 0.015625]])
    spread = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    keys = (GroupShape(128, 128), True), (GroupShape(1, 128), False)
    weight_key, activation_key = (create_fp8_quant_key(static=s, group_shape=g) for g, s in keys)
    kernel = kernel_of(weight_key, activation_key, (200, 256))
    assert type(kernel) is fp8_kernels.EmulatedFp8Block
    layer = torch.nn.Module()
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    kernel.process_weights_after_loading(layer)
    found = kernel.apply_weights(layer, inputs)
    grouped = inputs.float().view(5, 2, 128)
    x = e4m3(grouped, grouped.abs().amax(2, keepdim=True) / 448).view(5, 256)
    expected = x @ (codes.double() * spread.double()).t()
    for rows in (slice(0, 128), slice(128, 200)):
        gap, size = (found.double() - expected)[:, rows].abs().max(), expected[:, rows].abs().max()
        assert float(gap / size) < ROUNDING
