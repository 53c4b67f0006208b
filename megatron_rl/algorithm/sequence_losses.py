"""Losses with one ratio for each sequence, to be aggregated by `sequence_mean`.

Each token of a sequence has the sequence's loss, so that a token mean over the sequence is that loss again. Ratios are
over all sampled tokens of a sequence, those that the correction rejects included.
"""

import torch

from megatron_rl.algorithm.columns import LossInputs, TokenLosses
from megatron_rl.algorithm.losses import clipped
from megatron_rl.algorithm_settings import Gmpo, Gspo


def gspo(inputs: LossInputs, settings: Gspo) -> TokenLosses:
    """The clipped surrogate with ratio = exp of the mean log ratio over the sequence.

    The value is the sequence's ratio, and each token keeps its own gradient (GSPO-token, equation 14).
    """
    means = inputs.spread(inputs.sequence_mean(inputs.log_ratio.detach()))
    ratio = (inputs.logprobs - inputs.logprobs.detach() + means).exp()
    return clipped(inputs, ratio, settings.clip_low, settings.clip_high)


def gmpo(inputs: LossInputs, settings: Gmpo) -> TokenLosses:
    """-A * exp of the mean over the sequence of log ratios, each clipped in the direction of the advantage."""
    log_ratio, sign = inputs.log_ratio, inputs.advantages.sign()
    at_bounds = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * at_bounds)
    ratio = inputs.spread(inputs.sequence_mean(pessimistic).exp())
    outside = log_ratio != at_bounds
    return TokenLosses(
        losses=-ratio * inputs.advantages,
        metrics={
            "actor/pg_clipfrac": inputs.mean(outside & (inputs.advantages > 0)),
            "actor/pg_clipfrac_lower": inputs.mean(outside & (inputs.advantages < 0)),
        },
    )
