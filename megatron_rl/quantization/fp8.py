"""FP8 (e4m3) codes of weights on any device, byte for byte equal to Transformer Engine's.

`fp8_block`: one scale for each block of 128 x 128 weights, `X.weight` e4m3 [N, K] and `X.weight_scale_inv` float32
[ceil(N / 128), ceil(K / 128)]. `fp8_channel`: one scale for each output channel, `X.weight_scale` float32 [N, 1].
Transformer Engine has no such quantiser, so its rule for blocks is applied to rows. A weight is its code times the
inverse scale. The inverse scale travels.

The rule (transformer_engine 2.12, `common/recipe/recipe_common.cuh` and `quantize_transpose_square_blockwise.cu`):
scale = 448 / amax as IEEE division; 1 if amax is 0; the largest finite number of the weights' dtype if the quotient is
infinite; rounded down to a power of two on request; inverse = 1 / scale; code = e4m3(float(w) x scale), nearest even,
saturating.

One rule holds for every trainer layout, as in `formats`: codes of a box, given the scales of the whole tensor's blocks,
equal the same box of the whole tensor's codes. So every function gets the start of its box, and a block that a shard's
border cuts needs the maximum over its owners first.

Shape legend: N output channels, K inputs; P x Q blocks that a box touches.
"""

from typing import Final

import torch

from rollout.cpu.e4m3 import e4m3_numbers
from rollout.weights.format import FP8_BLOCK

BLOCK: Final = FP8_BLOCK
"""Rows and columns of a block."""
E4M3_MAX: Final = 448.0
_EXPONENT_BITS: Final = -(1 << 23)
"""Sign and exponent of a float32, the mantissa cleared."""


def block_amax(weight_NK: torch.Tensor, start: tuple[int, ...] = (0, 0)) -> torch.Tensor:
    """Largest magnitude in each block that a box touches, float32 [P, Q].

    Args:
        weight_NK: weights of the box.
        start: first row and column of the box in the whole tensor; blocks are counted from the tensor's first.
    """
    rows, columns = (_blocks(first, size) for first, size in zip(start, weight_NK.shape, strict=True))
    above, before = start[0] % BLOCK, start[1] % BLOCK
    below, behind = rows * BLOCK - above - weight_NK.shape[0], columns * BLOCK - before - weight_NK.shape[1]
    magnitudes = weight_NK.abs()
    if above or below or before or behind:
        magnitudes = torch.nn.functional.pad(magnitudes, (before, behind, above, below))
    of_columns = magnitudes.reshape(rows, BLOCK, columns * BLOCK).amax(dim=1)
    return of_columns.view(rows, columns, BLOCK).amax(dim=2).float()


def fp8_scale(amax: torch.Tensor, *, power_of_two: bool, dtype: torch.dtype) -> torch.Tensor:
    """Factors for weights with these largest magnitudes, applied before the cast: float32 of the same shape.

    Args:
        amax: any shape, float32, finite.
        power_of_two: round scales down to powers of two, Transformer Engine's default for blocks.
        dtype: dtype of the weights.
    """
    # not `448.0 / amax`: torch computes a reciprocal times 448, which differs for a quarter of all values
    scale = torch.full_like(amax, E4M3_MAX) / amax
    scale = torch.where(amax == 0, 1.0, scale)
    scale = torch.where(torch.isinf(scale), torch.finfo(dtype).max, scale)
    return (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32) if power_of_two else scale


def fp8_block_codes(
    weight_NK: torch.Tensor,
    scale_PQ: torch.Tensor,
    start: tuple[int, ...] = (0, 0),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes of a box whose blocks have these scales: e4m3 [N, K]; `start` as in `block_amax`.

    Written to `out` (same shape and dtype, contiguous) if it is given.
    """
    return copied_into(_cast(_times(weight_NK, scale_PQ, start)), out)


def fp8_block_values(codes_NK: torch.Tensor, inverse_PQ: torch.Tensor, start: tuple[int, ...] = (0, 0)) -> torch.Tensor:
    """Values that the engine computes with, float32 [N, K], from codes and inverse scales."""
    return _times(e4m3_numbers(codes_NK), inverse_PQ, start)


def fp8_channel_codes(weight_NK: torch.Tensor, scale_N1: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of a box whose rows have these scales: e4m3 [N, K]; `out` as in `fp8_block_codes`."""
    return copied_into(_cast(weight_NK.to(torch.float32, copy=True).mul_(scale_N1)), out)


def copied_into(codes: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The codes themselves, or `out` with the codes copied into it."""
    return codes if out is None else out.copy_(codes)


def _blocks(first: int, size: int) -> int:
    """Number of blocks that `size` rows from row `first` touch."""
    return -(-(first % BLOCK + size) // BLOCK)


def _times(box_NK: torch.Tensor, grid_PQ: torch.Tensor, start: tuple[int, ...]) -> torch.Tensor:
    """Each number times the factor of its block, float32 [N, K]."""
    product = box_NK.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if any(number % BLOCK for number in (*start, *box_NK.shape)):
        return product.mul_(_spread(grid_PQ, box_NK.shape, start))
    rows, columns = (size // BLOCK for size in box_NK.shape)
    product.view(rows, BLOCK, columns, BLOCK).mul_(grid_PQ[:, None, :, None])
    return product


def _spread(grid_PQ: torch.Tensor, shape: torch.Size, start: tuple[int, ...]) -> torch.Tensor:
    """The grid's value at each position of a box, [N, K]."""
    above, before = (first % BLOCK for first in start)
    rows = (torch.arange(shape[0], device=grid_PQ.device) + above) // BLOCK
    of_columns = grid_PQ.repeat_interleave(BLOCK, 1)[:, before : before + shape[1]]
    return of_columns[rows]


def _cast(scaled_NK: torch.Tensor) -> torch.Tensor:
    """Codes of float32 numbers, whose memory is overwritten."""
    # clamped, because torch casts numbers above 448 to NaN
    return scaled_NK.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
