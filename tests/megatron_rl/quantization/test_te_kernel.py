"""Transformer Engine's kernel and our reference give the same bytes; each box gets a backend that supports it."""

import pytest
import torch

from megatron_rl.quantization import te_kernel
from megatron_rl.quantization.backends import Quantizer, choose_backend
from megatron_rl.quantization.formats import CODE_FORMATS
from megatron_rl.quantization.fp8 import block_amax, fp8_block_codes, fp8_scale

ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("shape", [(128, 128), (384, 1024), (256, 640)])
def test_transformer_engine_and_reference_give_the_same_bytes(device: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).to(torch.bfloat16)
    weight[:128, :128] = 0
    scale = fp8_scale(block_amax(weight), power_of_two=True, dtype=torch.bfloat16)
    expected = fp8_block_codes(weight, scale)
    on_device = weight.to(device)
    assert te_kernel.has_whole_blocks(on_device, (128, 256))
    assert not te_kernel.has_whole_blocks(on_device[:100], (0, 0)) and not te_kernel.has_whole_blocks(
        on_device, (64, 0)
    )
    assert torch.equal(te_kernel.block_codes(on_device).cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("name", list(CODE_FORMATS))
def test_every_format_has_the_same_codes_on_every_device(device: str, name: str) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

    def codes(one: torch.Tensor) -> torch.Tensor:
        backend = choose_backend(CODE_FORMATS[name], one.device, [one.dtype])
        format = Quantizer(format=CODE_FORMATS[name], backend=backend)
        return format.codes(one, format.factors(format.amax(one, (0, 0))), (0, 0)).cpu().view(torch.uint8)

    assert torch.equal(codes(weight.to(device)), codes(weight))
