"""Weight formats: what a tensor becomes on the wire, and what the engine will multiply with.

One rule for every trainer layout: codes of a slice, given the scales of the whole tensor's blocks, equal the same
slice of the whole tensor's codes. So where a border cuts a block of weights that share a scale, the maximum over its
owners comes first (`Backend.amax` is local; the caller reduces it), and nothing else.

Formats: `bf16` is a cast. `int8` is symmetric per output channel (row of [N, K]), the layout of
compressed-tensors `int-quantized`: `X.weight` int8 [N, K] and `X.weight_scale` float32 [N, 1]. `fp8_channel` is the
same with e4m3 codes (`megatron_rl.quantization.fp8`), the layout of `float-quantized`. `fp8_block` has a scale for each
128 x 128 weights.

Shape legend: N output channels, K inputs; P x Q blocks that a slice touches (rows: N x 1).
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from megatron_rl.quantization.fp8 import copied_into, fp8_scale
from rollout.cpu.e4m3 import e4m3_numbers

INT8_MAX: Final = 127.0

Start = tuple[int, ...]
"""First row and column of a slice in the whole tensor, from which blocks are counted."""


def row_amax(weight_NK: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row in float32, [N, 1]; NaN of a row with one."""
    return weight_NK.abs().amax(dim=1, keepdim=True).float()


def int8_scale(amax: torch.Tensor) -> torch.Tensor:
    """Scale of weights with these largest magnitudes, float32 of the same shape; never zero."""
    tiny = torch.finfo(torch.float32).tiny
    return (amax.float().clamp_min(tiny) / INT8_MAX).clamp_min(tiny)


def int8_codes(weight_NK: torch.Tensor, scale_N1: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of a slice whose rows have the given scales: int8 [N, K], rounded half to even; in `out` if given."""
    exact_NK = weight_NK.to(torch.float32, copy=True)
    return copied_into(exact_NK.div_(scale_N1).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), out)


def channel_values(codes_NK: torch.Tensor, scale_N1: torch.Tensor) -> torch.Tensor:
    """What the engine multiplies with, float32 [N, K]."""
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
        """What weights are brought into range by, float32 [P, Q]; ValueError when a magnitude is not finite.

        It differs from what travels: FP8 is multiplied on the way there and on the way back, and `1 / (1 / x)` is not
        always `x`.
        """

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """What travels beside the codes, float32 [P, Q]."""


@dataclass(frozen=True, slots=True)
class Int8Channel:
    """`int8`"""

    dtype: torch.dtype = torch.int8
    in_blocks: bool = False

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """Magnitude over 127, by which weights are divided."""
        return int8_scale(_finite(amax_PQ))

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """The same."""
        return factor_PQ


@dataclass(frozen=True, slots=True)
class Fp8:
    """`fp8_channel`, or with `in_blocks` `fp8_block`, whose factors are rounded down to powers of two."""

    in_blocks: bool
    dtype: torch.dtype = torch.float8_e4m3fn

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """448 over magnitude, by which weights are multiplied."""
        # bfloat16's largest number in every case, so that the same values give the same codes whatever holds them
        return fp8_scale(_finite(amax_PQ), power_of_two=self.in_blocks, dtype=torch.bfloat16)

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """Its inverse."""
        return 1.0 / factor_PQ


def _finite(amax: torch.Tensor) -> torch.Tensor:
    # asked once a tensor, where factors are made: the answer has to come back from the device
    if not bool(torch.isfinite(amax).all()):
        raise ValueError(
            f"{int((~torch.isfinite(amax)).sum())} of {amax.numel()} scales would be of non-finite weights"
        )
    return amax


CODE_FORMATS: Final[dict[str, CodeFormat]] = {
    "int8": Int8Channel(),
    "fp8_channel": Fp8(in_blocks=False),
    "fp8_block": Fp8(in_blocks=True),
}
