"""The critic's loss: squared distance of values to returns, clipped as in PPO.

    v_clip = v_old + clamp(v - v_old, -clip, clip)
    loss   = 1/2 max((v - R)^2, (v_clip - R)^2)

The maximum is pessimistic: a token whose value has moved further than `clip` towards its return has no gradient
(Schulman et al. 2017, in the form of openai/baselines `ppo2`, which verl's `compute_value_loss` has as well). A
coefficient would change nothing but the clipping of gradients, because the critic has an Adam of its own.

Shape legend: T response tokens of a micro batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """The tokens of one micro batch; float32."""

    values: Tensor
    """[T], under autograd."""
    old_values: Tensor
    """[T], before the step's first update."""
    returns: Tensor
    """[T]"""
    coefficients: Tensor
    """[T], each token's share of the mini batch's mean (`megatron_rl.algorithm.aggregation`); 0 for a token that does
    not count, in metrics either."""
    num_tokens: int
    """Sampled tokens of the mini batch over all ranks: denominator of metrics."""


def value_loss(inputs: ValueInputs, *, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of one micro batch; their sums over micro batches and ranks are the mini batch's.

    `clip` = 0 turns clipping off.
    """
    squares = (inputs.values - inputs.returns).square()
    is_clipped = torch.zeros_like(squares, dtype=torch.bool)
    if clip > 0:
        moved = (inputs.values - inputs.old_values).clamp(-clip, clip)
        of_clipped = (inputs.old_values + moved - inputs.returns).square()
        is_clipped = of_clipped > squares
        squares = torch.maximum(squares, of_clipped)
    loss = 0.5 * (inputs.coefficients * squares).sum()
    count, counts = max(inputs.num_tokens, 1), inputs.coefficients > 0
    return loss, {
        "critic/vf_loss": loss.detach(),
        "critic/vf_clipfrac": (is_clipped & counts).float().sum() / count,
        "critic/vpred_mean": torch.where(counts, inputs.values.detach(), 0.0).sum() / count,
    }
