"""Weight formats: what a tensor becomes on the wire, and what the engine will multiply with.

One rule for every trainer layout: codes of a slice, given the scales of the whole tensor's blocks, equal the same
slice of the whole tensor's codes. So where a border cuts a block of weights that share a scale, the maximum over its
owners comes first (`CodeFormat.amax` is local; the caller reduces it), and nothing else.

Formats: `bf16` is a cast. `int8` is symmetric per output channel (row of [N, K]), the layout of
compressed-tensors `int-quantized`: `X.weight` int8 [N, K] and `X.weight_scale` float32 [N, 1]. `fp8_channel` is the
same with e4m3 codes (`megatron_rl.quantization.fp8`), the layout of `float-quantized`. `fp8_block` has a scale for each
128 x 128 weights.

Shape legend: N output channels, K inputs; P x Q blocks that a slice touches (rows: N x 1).
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from megatron_rl.cpu import code_loops
from megatron_rl.cpu.code_loops import Start
from megatron_rl.quantization import te_kernel
from megatron_rl.quantization.fp8 import (
    block_amax,
    fp8_block_codes,
    fp8_block_values,
    fp8_channel_codes,
    fp8_scale,
    kept,
)
from rollout.cpu.e4m3 import e4m3_numbers

INT8_MAX: Final = 127.0


def row_amax(weight_NK: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row in float32, [N, 1]; NaN of a row with one."""
    if code_loops.takes(weight_NK):
        return code_loops.amax_of(weight_NK, None)
    return weight_NK.abs().amax(dim=1, keepdim=True).float()


def int8_scale(amax: torch.Tensor) -> torch.Tensor:
    """Scale of weights with these largest magnitudes, float32 of the same shape; never zero."""
    tiny = torch.finfo(torch.float32).tiny
    return (amax.float().clamp_min(tiny) / INT8_MAX).clamp_min(tiny)


def int8_codes(weight_NK: torch.Tensor, scale_N1: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of a slice whose rows have the given scales: int8 [N, K], rounded half to even; in `out` if given."""
    if code_loops.takes(weight_NK):
        return code_loops.int8_of(weight_NK, scale_N1, out)
    exact_NK = weight_NK.to(torch.float32, copy=True)
    return kept(exact_NK.div_(scale_N1).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), out)


def channel_values(codes_NK: torch.Tensor, scale_N1: torch.Tensor) -> torch.Tensor:
    """What the engine multiplies with, float32 [N, K]."""
    if code_loops.takes(codes_NK):
        return code_loops.values_of(codes_NK, scale_N1, None)
    numbers_NK = e4m3_numbers(codes_NK) if codes_NK.dtype == torch.float8_e4m3fn else codes_NK
    return numbers_NK.float() * scale_N1


class CodeFormat(Protocol):
    """An 8-bit format: everything follows from the largest magnitude in each block of weights that share a scale."""

    def amax(self, weight_NK: torch.Tensor, start: Start) -> torch.Tensor:
        """Largest magnitudes of the blocks that a slice touches, as far as it shows them, float32 [P, Q]."""

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """What weights are brought into range by, float32 [P, Q]; ValueError when a magnitude is not finite.

        It differs from what travels: FP8 is multiplied on the way there and on the way back, and `1 / (1 / x)` is not
        always `x`.
        """

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """What travels beside the codes, float32 [P, Q]."""

    def codes(
        self, weight_NK: torch.Tensor, factor_PQ: torch.Tensor, start: Start, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Codes of a slice whose blocks have these factors, 8 bits [N, K]; `out`, contiguous, if there is one."""

    def values(self, codes_NK: torch.Tensor, scale_PQ: torch.Tensor, start: Start) -> torch.Tensor:
        """What the engine multiplies with, float32 [N, K], by the scales that travelled."""


@dataclass(frozen=True)
class Int8Channel:
    """`int8`"""

    def amax(self, weight_NK: torch.Tensor, start: Start) -> torch.Tensor:
        """Of rows."""
        return row_amax(weight_NK)

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """Magnitude over 127, by which weights are divided."""
        return int8_scale(_finite(amax_PQ))

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """The same."""
        return factor_PQ

    def codes(
        self, weight_NK: torch.Tensor, factor_PQ: torch.Tensor, start: Start, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int8"""
        return int8_codes(weight_NK, factor_PQ, out)

    def values(self, codes_NK: torch.Tensor, scale_PQ: torch.Tensor, start: Start) -> torch.Tensor:
        """Code times its row's scale."""
        return channel_values(codes_NK, scale_PQ)


@dataclass(frozen=True)
class Fp8Channel:
    """`fp8_channel`"""

    def amax(self, weight_NK: torch.Tensor, start: Start) -> torch.Tensor:
        """Of rows."""
        return row_amax(weight_NK)

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """448 over magnitude, by which weights are multiplied."""
        return _multiplier(_finite(amax_PQ), power_of_two=False)

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """Its inverse."""
        return 1.0 / factor_PQ

    def codes(
        self, weight_NK: torch.Tensor, factor_PQ: torch.Tensor, start: Start, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """e4m3"""
        return fp8_channel_codes(weight_NK, factor_PQ, out)

    def values(self, codes_NK: torch.Tensor, scale_PQ: torch.Tensor, start: Start) -> torch.Tensor:
        """Code times its row's inverse scale."""
        return channel_values(codes_NK, scale_PQ)


@dataclass(frozen=True)
class Fp8Block:
    """`fp8_block`, with scales that are powers of two: what DeepGEMM would round others to."""

    def amax(self, weight_NK: torch.Tensor, start: Start) -> torch.Tensor:
        """Of blocks."""
        return block_amax(weight_NK, start)

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """448 over magnitude, rounded down to a power of two, by which weights are multiplied."""
        return _multiplier(_finite(amax_PQ), power_of_two=True)

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """Its inverse."""
        return 1.0 / factor_PQ

    def codes(
        self, weight_NK: torch.Tensor, factor_PQ: torch.Tensor, start: Start, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """e4m3, by Transformer Engine where it can"""
        if te_kernel.takes(weight_NK, start):
            return kept(te_kernel.block_codes(weight_NK), out)
        return fp8_block_codes(weight_NK, factor_PQ, start, out)

    def values(self, codes_NK: torch.Tensor, scale_PQ: torch.Tensor, start: Start) -> torch.Tensor:
        """Code times its block's inverse scale."""
        return fp8_block_values(codes_NK, scale_PQ, start)


def _finite(amax: torch.Tensor) -> torch.Tensor:
    # asked once a tensor, where factors are made: the answer has to come back from the device
    if not bool(torch.isfinite(amax).all()):
        raise ValueError(
            f"{int((~torch.isfinite(amax)).sum())} of {amax.numel()} scales would be of non-finite weights"
        )
    return amax


def _multiplier(amax: torch.Tensor, *, power_of_two: bool) -> torch.Tensor:
    # bfloat16's largest number in every case, so that the same values give the same codes whatever holds them
    return fp8_scale(amax, power_of_two=power_of_two, dtype=torch.bfloat16)


CODE_FORMATS: Final[dict[str, CodeFormat]] = {
    "int8": Int8Channel(),
    "fp8_channel": Fp8Channel(),
    "fp8_block": Fp8Block(),
}
