"""INT8 codes on a grid of 3 bits: a sampler so far from its trainer that importance weights have something to repair.

A positive control of `benchmarks.learning.mismatch`, chosen by
`algorithm.loss=benchmarks.learning.coarse_codes.clipped_surrogate`: the loss is the product's, and importing this
module (only trainer ranks do, for that loss) coarsens what `int8` means.
"""

import torch

from megatron_rl.algorithm.loss import clipped_surrogate as clipped_surrogate
from megatron_rl.cpu.code_loops import Start
from megatron_rl.quantization.formats import CODE_FORMATS, Int8Channel
from megatron_rl.quantization.fp8 import kept

STEP = 32
"""Codes are multiples of it: -96, -64, .. 96."""


class Coarse(Int8Channel):
    """`int8` with seven values."""

    def codes(
        self, weight_NK: torch.Tensor, factor_PQ: torch.Tensor, start: Start, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int8, multiples of `STEP`"""
        fine = super().codes(weight_NK, factor_PQ, start)
        return kept(((fine.float() / STEP).round().clamp_(-3, 3) * STEP).to(torch.int8), out)


CODE_FORMATS["int8"] = Coarse()
