"""Weight formats: what a tensor becomes on the wire, and what the engine will multiply with.

One rule for every trainer layout: codes of a slice, given the scale of its full rows, equal the same
slice of the whole tensor's codes. So a row-parallel shard needs the maximum over all ranks first
(`row_amax` is local; the caller reduces it), and nothing else.

Formats: `bf16` is a cast. `int8` is symmetric per output channel (row of [N, K]), the layout of
compressed-tensors `int-quantized`: `X.weight` int8 [N, K] and `X.weight_scale` float32 [N, 1].

Shape legend: N output channels, K inputs.
"""

from typing import Final

import torch

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


def int8_values(codes_NK: torch.Tensor, scale_N1: torch.Tensor) -> torch.Tensor:
    """What the engine multiplies with, float32 [N, K]."""
    return codes_NK.float() * scale_N1
