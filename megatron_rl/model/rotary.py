"""Rotary position embedding of packed sequences, and Llama-3's scaling of its frequencies.

Megatron's unfused rotation builds five temporaries of the size of the queries and as many gradients. Its fused rotation
is Transformer Engine's and needs CUDA. `rotate_packed` replaces the fused one (with its signature) elsewhere: one pass
forward, one pass backward (the inverse rotation). On a CPU this halves the memory traffic outside matrix products.
Rotation is in FP32, as in Transformer Engine.

Shape legend: T rows of the packed batch, N heads, D head size, S tokens of the longest sequence.
"""

import math
from typing import Protocol

import torch

from megatron_rl.model.spec import RopeScaling


def rotate_packed(
    heads_TND: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, cp_size: int = 1, cp_rank: int = 0
) -> torch.Tensor:
    """Rotate each head by the angles of its position in its own sequence, [T, N, D].

    `cu_seqlens` [B + 1] holds the starts of the sequences and T; `freqs` [S, 1, 1, D] the angles of each
    position, the first half of D repeated in the second.
    """
    angles = freqs[:, 0, 0, : freqs.shape[-1] // 2].float()
    rows = positions(cu_seqlens, len(heads_TND))
    rotated: torch.Tensor = _Rotate.apply(  # type: ignore[no-untyped-call]
        heads_TND, angles.cos()[rows, None], angles.sin()[rows, None]
    )
    return rotated


def positions(cu_seqlens: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Position of each of the `num_rows` rows within its sequence, [T] int64."""
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), cu_seqlens.diff().long(), output_size=num_rows)
    return torch.arange(num_rows, device=cu_seqlens.device) - starts


class _Context(Protocol):
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, heads_TND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(heads_TND, cos, sin, direction=1)

    @staticmethod
    def backward(ctx: _Context, grad_TND: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(grad_TND, cos, sin, direction=-1), None, None


def _rotated(heads_TND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, direction: int) -> torch.Tensor:
    first, second = heads_TND.float().chunk(2, dim=-1)
    out = torch.empty_like(heads_TND, dtype=torch.float32, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out.to(heads_TND.dtype)


def scaled_frequencies(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama-3 rotary frequencies, [D / 2] FP32, from unscaled ones.

    Frequencies with wavelengths above `original / low_freq_factor` are divided by `factor`. Those below
    `original / high_freq_factor` stay. In between, both are mixed linearly in the inverse wavelength.
    """
    turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
    unscaled = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return inv_freq * (unscaled + (1 - unscaled) / scaling.factor)
