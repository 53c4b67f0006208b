"""Weights that change between publishes without an optimizer: in every matrix every 20th of them turns its sign.

For `benchmarks.publish`, whose model is too large to train here; chosen by
`algorithm.loss=benchmarks.publish.changing_weights.clipped_surrogate`: the loss is the product's, and importing this
module (only trainer ranks do, for that loss) has weights change ahead of each publish. Magnitudes stay, with them all
scales.
"""

import torch

from megatron_rl.algorithm.loss import clipped_surrogate as clipped_surrogate
from megatron_rl.weights.packer import WeightPacker

EVERY = 20

_refresh_scales = WeightPacker.refresh_scales


@torch.no_grad()
def _change_and_refresh(packer: WeightPacker) -> None:
    for parameter in packer._parameters.values():
        if parameter.dim() == 2:
            parameter.view(-1)[::EVERY].neg_()
    _refresh_scales(packer)


WeightPacker.refresh_scales = _change_and_refresh  # type: ignore[method-assign, assignment]
