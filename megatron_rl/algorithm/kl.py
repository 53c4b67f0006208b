"""Divergence of the policy from a reference policy at single tokens.

d = ref_logprobs - logprobs. For tokens that the policy has sampled, the mean of each estimator is the divergence
KL(policy || reference), or close to it (k2). As a term of a loss, k2 has the gradient of the divergence on policy, and
`k3_unbiased` on and off policy; k3 and k1 have others (http://joschu.net/blog/kl-approx.html; DeepSeek-V3.2, arXiv
2512.02556). In a reward, k3 is bounded: a single token with a far larger estimate would dominate the whitening of the
whole step.
"""

import torch
from torch import Tensor

from megatron_rl.algorithm.columns import LOG_RATIO_BOUND, LossInputs
from megatron_rl.algorithm_config import KlEstimator

REWARD_BOUND = 10.0
"""Largest k3 of a token in a reward, as in verl."""


def divergence(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KlEstimator) -> Tensor:
    """The estimate at each token, [T]; `k3_unbiased` is here without its ratio."""
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return bounded.exp() - 1.0 - bounded


def loss_term(inputs: LossInputs, *, estimator: KlEstimator) -> Tensor:
    """The estimate at each token, [T], under autograd."""
    tokens = divergence(inputs.logprobs, inputs.ref_logprobs, estimator=estimator)
    return inputs.log_ratio.exp() * tokens if estimator == "k3_unbiased" else tokens


def reward_term(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KlEstimator) -> tuple[Tensor, Tensor]:
    """The estimate at each token as a cost in its reward, [T], and which ones are bounded, [T] bool."""
    tokens = divergence(logprobs, ref_logprobs, estimator=estimator)
    if estimator != "k3":
        return tokens, torch.zeros_like(tokens, dtype=torch.bool)
    return tokens.clamp(max=REWARD_BOUND), tokens > REWARD_BOUND
