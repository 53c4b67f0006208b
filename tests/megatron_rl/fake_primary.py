"""A parameter that is FP8 itself, without Transformer Engine: its fields, and nothing that a tensor has beside them.

Whoever takes it for a tensor fails: it can be neither sliced nor detached nor written to.
"""

import torch

from megatron_rl.weights.fp8 import block_amax, fp8_block_codes, fp8_scale


class Quantizer:
    force_pow_2_scales = True


class FakePrimary:
    """As `Float8BlockwiseQTensor` lays it out; what its padding of scales holds is no number."""

    _is_2D_scaled = True  # noqa: N815  upstream's name

    def __init__(self, weight):
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._quantizer = Quantizer()
        self.quantize_(weight)

    def quantize_(self, weight):
        assert weight.shape == self.shape and weight.dtype == self.dtype
        scale = fp8_scale(block_amax(weight), power_of_two=True, dtype=torch.bfloat16)
        self._rowwise_data = fp8_block_codes(weight, scale).view(torch.uint8)
        self._columnwise_data = self._rowwise_data.t().contiguous()
        self._rowwise_scale_inv = padded(1.0 / scale)
        self._columnwise_scale_inv = padded((1.0 / scale).t())

    def get_high_precision_init_val(self):
        return self._high_precision_init_val


def padded(grid):
    """Columns up to a multiple of four."""
    return torch.nn.functional.pad(grid, (0, -grid.shape[1] % 4), value=float("nan"))
