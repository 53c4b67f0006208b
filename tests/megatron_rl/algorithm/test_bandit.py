"""A bandit with a known, biased sampler: the gradient's bias with and without correction, in closed form.

K arms with fixed advantages A; the trainer's policy is pi = softmax(theta), the sampler's is mu. On policy the gradient
of the loss is -sum_a pi(a) A(a) grad log pi(a); sampling from mu with weights w gives -sum_a mu(a) w(a) A(a) grad log
pi(a). With grad log pi(a) = onehot(a) - pi both are K-vectors that need no autograd.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.correction import PackedLogprobs, correction_weights
from megatron_rl.config import CorrectionConfig
from tests.support.loss_inputs import loss_inputs, run_loss

NUM_ARMS = 12
RNG = np.random.default_rng(3)
RARE = np.arange(NUM_ARMS) == 4
THETA = RNG.normal(0, 1.0, NUM_ARMS) + 1.5 * RARE
PI = np.exp(THETA) / np.exp(THETA).sum()
# A sampler that is off as a coarse quantiser is: logits rounded to halves, and one arm far too rare.
SAMPLER_LOGITS = np.round(THETA * 2) / 2 - 1.5 * RARE
MU = np.exp(SAMPLER_LOGITS) / np.exp(SAMPLER_LOGITS).sum()
ADVANTAGES = RNG.normal(0, 1.0, NUM_ARMS) + 2.0 * RARE
NUM_SAMPLES = 200_000


def closed_form(arm_weights):
    """-sum_a weight(a) A(a) (onehot(a) - pi)"""
    pull = arm_weights * ADVANTAGES
    return -(pull - pull.sum() * PI)


TRUE_GRADIENT = closed_form(PI)


def ours(arms, shares, correction):
    """Gradient [K] of our loss with respect to theta, on the given arms with their shares of the mean."""
    theta = torch.tensor(THETA, dtype=torch.float32, requires_grad=True)
    logprobs = theta.log_softmax(-1)[torch.as_tensor(arms)]
    lengths = torch.ones(len(arms), dtype=torch.int64)
    packed = PackedLogprobs(
        old_logprobs=logprobs.detach(),
        rollout_logprobs=torch.tensor(np.log(MU)[arms], dtype=torch.float32),
        lengths=lengths,
    )
    inputs = loss_inputs(logprobs, logprobs.detach(), ADVANTAGES[arms], lengths=lengths.tolist())
    inputs = replace(inputs, coefficients=torch.as_tensor(shares, dtype=torch.float32))
    result = run_loss("clipped_surrogate", inputs, weights=correction_weights(packed, config=correction))
    result.loss.backward()
    return theta.grad.numpy()


CASES = {
    "none": (CorrectionConfig(mode="none"), MU),
    "tis, cap 2": (CorrectionConfig(mode="tis_token", cap=2.0), MU * np.minimum(PI / MU, 2.0)),
    "tis, cap never reached": (CorrectionConfig(mode="tis_token", cap=1e6), PI),
    "icepop": (
        CorrectionConfig(mode="icepop", low=0.5, cap=2.0),
        PI * ((PI / MU >= 0.5) & (PI / MU <= 2.0)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_expected_gradient_is_the_closed_form(name):
    correction, arm_weights = CASES[name]
    expected = ours(np.arange(NUM_ARMS), MU, correction)
    assert expected == pytest.approx(closed_form(arm_weights), abs=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_sampled_gradient_lies_within_five_standard_errors_of_the_closed_form(name):
    correction, arm_weights = CASES[name]
    arms = np.random.default_rng(5).choice(NUM_ARMS, size=NUM_SAMPLES, p=MU)
    sampled = ours(arms, np.full(NUM_SAMPLES, 1.0 / NUM_SAMPLES), correction)
    per_arm = (arm_weights / MU * ADVANTAGES)[:, None] * (np.eye(NUM_ARMS) - PI)
    variance = MU @ per_arm**2 - (MU @ per_arm) ** 2
    errors = np.abs(sampled - closed_form(arm_weights)) / np.sqrt(variance / NUM_SAMPLES)
    assert errors.max() < 5


def test_correction_removes_the_bias_of_the_sampler():
    def bias(arm_weights):
        return np.linalg.norm(closed_form(arm_weights) - TRUE_GRADIENT) / np.linalg.norm(TRUE_GRADIENT)

    uncorrected, capped, uncapped = (bias(CASES[name][1]) for name in ("none", "tis, cap 2", "tis, cap never reached"))
    assert uncorrected > 0.3
    assert capped < 0.7 * uncorrected
    assert uncapped == pytest.approx(0.0, abs=1e-12)
    # The remaining bias is exactly the mass that the cap cut: sum over arms beyond it of (pi - cap * mu) A grad log pi.
    cut = np.maximum(PI - 2.0 * MU, 0.0)
    residual = closed_form(CASES["tis, cap 2"][1]) - TRUE_GRADIENT
    assert residual == pytest.approx(-closed_form(cut))
    assert cut.sum() > 0
