"""Losses of single tokens: a function of the token's log-probabilities and its advantage.

With ratio = exp(logprobs - old_logprobs) and A the advantage. Invariants: ratios that only scale are detached. At
logprobs = old_logprobs every loss but `reinforce`'s value has the gradient -A. An empty micro batch gives no losses.
`megatron_rl.algorithm_settings` names the source of each.
"""

import math

import torch
from torch import Tensor

from megatron_rl.algorithm.columns import LOG_RATIO_BOUND, LossInputs, TokenLosses
from megatron_rl.algorithm_settings import Bypass, Cispo, ClippedSurrogate, Dppo, Reinforce, Sapo


def clipped_surrogate(inputs: LossInputs, settings: ClippedSurrogate) -> TokenLosses:
    """-min(ratio * A, clip(ratio) * A)."""
    return clipped(inputs, inputs.log_ratio.exp(), settings.clip_low, settings.clip_high, dual_clip=settings.dual_clip)


def bypass(inputs: LossInputs, settings: Bypass) -> TokenLosses:
    """The clipped surrogate with ratio = exp(logprobs - rollout_logprobs)."""
    log_ratio = (inputs.logprobs - inputs.rollout_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return clipped(inputs, log_ratio.exp(), settings.clip_low, settings.clip_high, dual_clip=settings.dual_clip)


def clipped(
    inputs: LossInputs, ratio: Tensor, clip_low: float, clip_high: float, *, dual_clip: float = 0.0
) -> TokenLosses:
    """The surrogate of any `ratio`, [T]."""
    unclipped = -ratio * inputs.advantages
    at_bounds = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * inputs.advantages
    losses = torch.maximum(unclipped, at_bounds)
    lower = torch.zeros_like(losses, dtype=torch.bool)
    if dual_clip > 0:
        bound = -dual_clip * inputs.advantages
        lower = (inputs.advantages < 0) & (losses > bound)
        losses = torch.where(lower, bound, losses)
    metrics = {
        "actor/pg_clipfrac": inputs.mean(at_bounds > unclipped),
        "actor/pg_clipfrac_lower": inputs.mean(lower),
    }
    return TokenLosses(losses=losses, metrics=metrics)


def cispo(inputs: LossInputs, settings: Cispo) -> TokenLosses:
    """-detach(clip(ratio)) * A * logprobs."""
    ratio = inputs.log_ratio.detach().exp()
    at_bounds = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return TokenLosses(
        losses=-at_bounds * inputs.advantages * inputs.logprobs,
        metrics={"actor/pg_clipfrac": inputs.mean(at_bounds != ratio)},
    )


def sapo(inputs: LossInputs, settings: Sapo) -> TokenLosses:
    """-gate(ratio) * A with gate(x) = 4 / tau * sigmoid(tau * (x - 1)), whose slope at 1 is 1."""
    tau = torch.where(inputs.advantages > 0, settings.tau_positive, settings.tau_negative)
    gate = torch.sigmoid(tau * (inputs.log_ratio.exp() - 1.0)) * (4.0 / tau)
    return TokenLosses(losses=-gate * inputs.advantages)


def dppo(inputs: LossInputs, settings: Dppo) -> TokenLosses:
    """-detach(min(ratio, cap)) * A * logprobs where the token's probability has not left the trust region.

    A token leaves it by moving in the direction of its advantage, farther than the bound of that direction.
    """
    ratio = inputs.log_ratio.detach().exp().clamp(max=settings.ratio_cap)
    new, old = inputs.logprobs.detach(), inputs.old_logprobs
    moved = _binary_kl(old, new) if settings.divergence == "kl" else (new.exp() - old.exp()).abs()
    rises = inputs.advantages > 0
    outside = torch.where(
        rises, (new > old) & (moved > settings.bound_high), (new < old) & (moved > settings.bound_low)
    )
    return TokenLosses(
        losses=-(~outside).float() * ratio * inputs.advantages * inputs.logprobs,
        metrics={"actor/pg_clipfrac": inputs.mean(outside)},
    )


def reinforce(inputs: LossInputs, settings: Reinforce) -> TokenLosses:
    """-A * logprobs."""
    del settings
    return TokenLosses(losses=-inputs.advantages * inputs.logprobs)


_SMALLEST = 1e-8
"""Probabilities are kept this far from 0 and 1, where the divergence is infinite."""
_LOGPROBS = (math.log(_SMALLEST), math.log1p(-_SMALLEST))
"""Their logarithms."""


def _binary_kl(old_logprobs: Tensor, new_logprobs: Tensor) -> Tensor:
    """KL(old || new) between a token and all others, [T] float64: in float32, 1 - `_SMALLEST` is 1."""
    old, new = (each.double().clamp(*_LOGPROBS) for each in (old_logprobs, new_logprobs))
    others, others_new = -old.expm1(), -new.expm1()
    return old.exp() * (old - new) + others * (others / others_new).log()
