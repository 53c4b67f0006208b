"""Changes weights between publishes without an optimizer: every 20th weight of every matrix changes its sign.

For `benchmarks.publish`, whose model is too large to train here. Selected by
`algorithm.loss=benchmarks.publish.changing_weights.clipped_surrogate`. The loss is the product's. Importing this module
makes weights change before each publish; only trainer ranks import it, for this loss. Magnitudes and scales stay equal.
"""

import torch

from megatron_rl.algorithm.losses import clipped_surrogate as clipped_surrogate
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
