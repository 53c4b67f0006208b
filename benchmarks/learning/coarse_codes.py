"""INT8 codes on a grid of 3 bits: a sampler so far from its trainer that importance weights have something to repair.

A positive control of `benchmarks.learning.mismatch`, chosen by
`algorithm.loss=benchmarks.learning.coarse_codes.clipped_surrogate`: the loss is the product's, and importing this
module (only trainer ranks do, for that loss) coarsens what `int8` means.
"""

from collections.abc import Collection

import torch

from megatron_rl.algorithm.loss import clipped_surrogate as clipped_surrogate
from megatron_rl.quantization.backends import BACKENDS, TorchBackend
from megatron_rl.quantization.formats import CodeFormat, Start
from megatron_rl.quantization.fp8 import copied_into

STEP = 32
"""Codes are multiples of it: -96, -64, .. 96."""


class Coarse(TorchBackend):
    """`int8` with seven values."""

    def supports(self, format: CodeFormat, device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
        """Only `int8`."""
        return format.dtype == torch.int8

    def encode(
        self,
        weight_NK: torch.Tensor,
        factor_PQ: torch.Tensor,
        start: Start | None,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int8, multiples of `STEP`"""
        fine = super().encode(weight_NK, factor_PQ, start, dtype)
        return copied_into(((fine.float() / STEP).round().clamp_(-3, 3) * STEP).to(torch.int8), out)


BACKENDS.insert(0, Coarse())
