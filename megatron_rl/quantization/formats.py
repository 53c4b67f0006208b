"""Weight formats: scales and layout of a tensor on the wire, and the values that the engine computes with.

One rule holds for every trainer layout: codes of a box, given the scales of the whole tensor's blocks, equal the same
box of the whole tensor's codes. So if a border between shards cuts a block of weights that share a scale, only the
largest magnitude must be reduced over the block's owners first (`Backend.amax` is local; the caller reduces it).

Formats: `bf16` is a cast. `int8` is symmetric per output channel (row of [N, K]), the layout of compressed-tensors
`int-quantized`: `X.weight` int8 [N, K] and `X.weight_scale` float32 [N, 1]. `fp8_channel` is the same with e4m3 codes
(`megatron_rl.quantization.fp8`), the layout of `float-quantized`. `fp8_block` has a scale for each 128 x 128 weights.

Shape legend: N output channels, K inputs; P x Q blocks that a box touches (rows: N x 1).
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from megatron_rl.quantization.fp8 import copied_into, fp8_scale
from rollout.cpu.e4m3 import e4m3_numbers

INT8_MAX: Final = 127.0

Start = tuple[int, ...]
"""First row and column of a box in the whole tensor; blocks are counted from the tensor's first."""


def row_amax(weight_NK: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row in float32, [N, 1]; NaN for a row with a NaN."""
    return weight_NK.abs().amax(dim=1, keepdim=True).float()


def int8_scale(amax: torch.Tensor) -> torch.Tensor:
    """Scale of weights with these largest magnitudes, float32 of the same shape; never zero."""
    tiny = torch.finfo(torch.float32).tiny
    largest = amax.float().clamp_min(tiny)
    # torch divides by a number on CUDA as a product with its reciprocal, which rounds otherwise than on the host
    return (largest / torch.full_like(largest, INT8_MAX)).clamp_min(tiny)


def int8_codes(weight_NK: torch.Tensor, scale_N1: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of a box whose rows have the given scales: int8 [N, K], rounded half to even; written to `out` if given."""
    exact_NK = weight_NK.to(torch.float32, copy=True)
    return copied_into(exact_NK.div_(scale_N1).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), out)


def channel_values(codes_NK: torch.Tensor, scale_N1: torch.Tensor) -> torch.Tensor:
    """Values that the engine computes with, float32 [N, K]."""
    numbers_NK = e4m3_numbers(codes_NK) if codes_NK.dtype == torch.float8_e4m3fn else codes_NK
    return numbers_NK.float() * scale_N1


class CodeFormat(Protocol):
    """Scales and layout of an 8-bit format; a `megatron_rl.quantization.backends.Backend` makes the codes."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a code."""

    @property
    def in_blocks(self) -> bool:
        """Whether blocks of 128 x 128 weights share a scale; otherwise each row has one."""

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """Factors that bring weights into range, float32 [P, Q].

        They are not the scales that travel: FP8 multiplies for encoding and for decoding, and `1 / (1 / x)` is not
        always `x`.

        Raises:
            ValueError: a magnitude is not finite.
        """

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """Scales that travel with the codes, float32 [P, Q]."""


@dataclass(frozen=True, slots=True)
class Int8Channel:
    """`int8`."""

    dtype: torch.dtype = torch.int8
    in_blocks: bool = False

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """Magnitude / 127; weights are divided by it."""
        return int8_scale(_finite(amax_PQ))

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """Equal to the factors."""
        return factor_PQ


@dataclass(frozen=True, slots=True)
class Fp8:
    """`fp8_channel`, or with `in_blocks` `fp8_block`, whose factors are rounded down to powers of two."""

    in_blocks: bool
    dtype: torch.dtype = torch.float8_e4m3fn

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """448 / magnitude; weights are multiplied by it."""
        # bfloat16's largest number for every dtype, so that equal values give equal codes in any dtype
        return fp8_scale(_finite(amax_PQ), power_of_two=self.in_blocks, dtype=torch.bfloat16)

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """Inverse factors."""
        return 1.0 / factor_PQ


def _finite(amax: torch.Tensor) -> torch.Tensor:
    # checked once per tensor, because the check waits for the device
    if not bool(torch.isfinite(amax).all()):
        raise ValueError(
            f"{int((~torch.isfinite(amax)).sum())} of {amax.numel()} scales belong to weights that are not finite"
        )
    return amax


CODE_FORMATS: Final[dict[str, CodeFormat]] = {
    "int8": Int8Channel(),
    "fp8_channel": Fp8(in_blocks=False),
    "fp8_block": Fp8(in_blocks=True),
}
