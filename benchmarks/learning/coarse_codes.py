"""INT8 codes rounded to 3 bits: a sampler so far from its trainer that importance weights must correct it.

The positive control of `benchmarks.learning.mismatch`, selected by
`algorithm.loss=benchmarks.learning.coarse_codes.clipped_surrogate`. The loss is the product's. Importing this module
makes `int8` codes coarser; only trainer ranks import it, for this loss.
"""

from collections.abc import Collection

import torch

from megatron_rl.algorithm.losses import clipped_surrogate as clipped_surrogate
from megatron_rl.quantization.backends import BACKENDS, TorchBackend
from megatron_rl.quantization.formats import CodeFormat, Start
from megatron_rl.quantization.fp8 import copied_into

STEP = 32
"""Codes are multiples of STEP: -96, -64, .. 96."""


class Coarse(TorchBackend):
    """Backend whose `int8` codes have seven values."""

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
        """int8 codes, multiples of `STEP`."""
        fine = super().encode(weight_NK, factor_PQ, start, dtype)
        return copied_into(((fine.float() / STEP).round().clamp_(-3, 3) * STEP).to(torch.int8), out)


BACKENDS.insert(0, Coarse())
