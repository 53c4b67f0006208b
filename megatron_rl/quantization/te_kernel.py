"""`fp8_block` codes by Transformer Engine's own kernel, for boxes of whole blocks on a CUDA device.

One kernel makes the same bytes as `megatron_rl.quantization.fp8` (a test compares). It computes the largest magnitude
itself, so it cannot encode a block that a shard's border cuts.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from megatron_rl.quantization.fp8 import BLOCK


def has_whole_blocks(weight_NK: torch.Tensor, start: tuple[int, ...]) -> bool:
    """Whether no block of a box is cut."""
    return not any(number % BLOCK for number in (*start, *weight_NK.shape))


def block_codes(weight_NK: torch.Tensor) -> torch.Tensor:
    """Codes of a box of whole blocks under power-of-two scales, e4m3 [N, K]."""
    quantised = _quantizer()(weight_NK.contiguous())
    codes: torch.Tensor = quantised._rowwise_data.view(torch.float8_e4m3fn)
    return codes


@cache
def is_installed() -> bool:
    """Whether Transformer Engine's kernels can be imported."""
    return find_spec("transformer_engine_torch") is not None


@cache
def _quantizer() -> Callable[[torch.Tensor], Any]:
    import transformer_engine.pytorch  # noqa: F401  loads the library that the next import needs
    import transformer_engine_torch
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer: Callable[[torch.Tensor], Any] = Float8BlockQuantizer(
        fp8_dtype=transformer_engine_torch.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        amax_epsilon=0.0,
        force_pow_2_scales=True,
        block_scaling_dim=2,
    )
    return quantizer
