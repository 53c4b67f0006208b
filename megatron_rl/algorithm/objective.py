"""The scalar that a micro batch adds to the loss of its mini batch.

    sum over tokens of share * (weight * token loss + kl coefficient * divergence) - entropy coefficient * mean entropy

The *sum* of these scalars over micro batches and data-parallel ranks is the loss of the mini batch, and metrics are
summed in the same way. They have verl's names where the meaning is the same. Weights of the correction are detached and
do not weight the divergence, as in verl.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.algorithm.columns import LossInputs, TokenLosses
from megatron_rl.algorithm.kl import loss_term
from megatron_rl.algorithm_config import KlEstimator
from megatron_rl.algorithm_settings import LOSSES

BoundLoss = Callable[[LossInputs], TokenLosses]
"""A loss with its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Loss and metrics of one micro batch."""

    loss: Tensor
    """Scalar for the backward pass; needs no further scaling."""
    metrics: Mapping[str, Tensor]
    """Detached scalars; their sums over micro batches and data-parallel ranks are the mini batch's metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Coefficients of what is added to the policy loss."""

    kl_estimator: KlEstimator = "k3"
    kl_coefficient: float | None = None
    """None without a divergence in the loss."""
    entropy_coefficient: float = 0.0


def objective(loss: BoundLoss, inputs: LossInputs, *, weights: Tensor, terms: Terms) -> LossOutput:
    """The scalar of one micro batch; `weights` are [T], of the correction, 0 for rejected tokens.

    Raises ValueError for a loss that does not return one number for each token.
    """
    tokens = loss(inputs)
    if tokens.losses.shape != inputs.logprobs.shape:
        raise ValueError(
            f"{LOSSES.key} returned losses of shape {tuple(tokens.losses.shape)} for {len(inputs.logprobs)} tokens; "
            "return one loss for each token, and no mean: shares of the mean are multiplied later"
        )
    policy_loss = inputs.sampled(inputs.coefficients * weights * tokens.losses).sum()
    entropy = inputs.sampled(inputs.entropy).sum() / max(inputs.num_tokens, 1)
    total = policy_loss - terms.entropy_coefficient * entropy if terms.entropy_coefficient else policy_loss
    metrics = {
        "actor/pg_loss": policy_loss.detach(),
        "actor/entropy": entropy.detach(),
        "actor/ppo_kl": inputs.mean(-inputs.log_ratio),
        **tokens.metrics,
    }
    if terms.kl_coefficient is not None:
        divergence = loss_term(inputs, estimator=terms.kl_estimator)
        kl_loss = inputs.sampled(inputs.coefficients * divergence).sum()
        total = total + terms.kl_coefficient * kl_loss
        metrics |= {"actor/kl_loss": kl_loss.detach(), "actor/kl": inputs.mean(divergence)}
    return LossOutput(loss=total, metrics=metrics)


def sft_loss(logprobs: Tensor, *, coefficients: Tensor) -> LossOutput:
    """Negative log-probability, weighted by each token's share of the mean; both are [T] float32."""
    loss = -(coefficients * logprobs).sum()
    return LossOutput(loss=loss, metrics={"sft/loss": loss.detach()})
