"""Weight formats: what a tensor becomes on the wire, and what the engine will multiply with.

One rule for every trainer layout: codes of a slice, given the scale of its full rows, equal the same
slice of the whole tensor's codes. So a row-parallel shard needs the maximum over all ranks first
(`row_amax` is local; the caller reduces it), and nothing else.

Formats: `bf16` is a cast. `int8` is symmetric per output channel (row of [N, K]), the layout of
compressed-tensors `int-quantized`: `X.weight` int8 [N, K] and `X.weight_scale` float32 [N, 1]. `fp8_channel` is the
same with e4m3 codes (`megatron_rl.weights.fp8`), the layout of `float-quantized`.

Shape legend: N output channels, K inputs.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from megatron_rl.weights.fp8 import fp8_channel_codes, fp8_scale

INT8_MAX: Final = 127.0


def row_amax(weight_NK: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row in float32, [N]."""
    return weight_NK.float().abs().amax(dim=1)


def int8_scale(amax_N: torch.Tensor) -> torch.Tensor:
    """Scale of each output channel, float32 [N, 1]; never zero.

    Raises:
        ValueError: a row holds a non-finite weight, which no code can stand for.
    """
    if not bool(torch.isfinite(amax_N).all()):
        raise ValueError(f"{int((~torch.isfinite(amax_N)).sum())} output channels hold non-finite weights")
    tiny = torch.finfo(torch.float32).tiny
    return (amax_N.float().clamp_min(tiny) / INT8_MAX).clamp_min(tiny).unsqueeze(1)


def int8_codes(weight_NK: torch.Tensor, scale_N1: torch.Tensor) -> torch.Tensor:
    """Codes of a slice whose rows have the given scales: int8 [N, K], rounded half to even."""
    return (weight_NK.float() / scale_N1).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def channel_values(codes_NK: torch.Tensor, scale_N1: torch.Tensor) -> torch.Tensor:
    """What the engine multiplies with, float32 [N, K]."""
    return codes_NK.float() * scale_N1


class ChannelFormat(Protocol):
    """An 8-bit format with one scale for each output channel; everything follows from the rows' largest magnitudes."""

    def scales(self, amax_N: torch.Tensor) -> torch.Tensor:
        """What travels beside the codes, float32 [N, 1]; ValueError when a magnitude is not finite."""

    def codes(self, weight_NK: torch.Tensor, amax_N: torch.Tensor) -> torch.Tensor:
        """Codes of a slice of rows with these magnitudes, 8 bits [N, K]."""


@dataclass(frozen=True)
class Int8Channel:
    """`int8`"""

    def scales(self, amax_N: torch.Tensor) -> torch.Tensor:
        """Magnitude over 127."""
        return int8_scale(amax_N)

    def codes(self, weight_NK: torch.Tensor, amax_N: torch.Tensor) -> torch.Tensor:
        """int8"""
        return int8_codes(weight_NK, int8_scale(amax_N))


@dataclass(frozen=True)
class Fp8Channel:
    """`fp8_channel`"""

    def scales(self, amax_N: torch.Tensor) -> torch.Tensor:
        """Inverse of what weights were multiplied by."""
        return 1.0 / self._multiplier(amax_N)

    def codes(self, weight_NK: torch.Tensor, amax_N: torch.Tensor) -> torch.Tensor:
        """e4m3"""
        return fp8_channel_codes(weight_NK, self._multiplier(amax_N))

    def _multiplier(self, amax_N: torch.Tensor) -> torch.Tensor:
        # bfloat16's largest number in every case, so that the same values give the same codes whatever holds them
        return fp8_scale(amax_N, power_of_two=False, dtype=torch.bfloat16).unsqueeze(1)


CHANNEL_FORMATS: Final[dict[str, ChannelFormat]] = {"int8": Int8Channel(), "fp8_channel": Fp8Channel()}
