"""Divergence from the reference as a term of the loss, and coefficients that adapt."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithm.coefficients import Coefficients
from megatron_rl.algorithm.kl import divergence, reward_term
from megatron_rl.algorithm.objective import Terms
from megatron_rl.config import AlgorithmConfig
from tests.support.loss_inputs import loss_inputs, run_loss

LOGITS = [0.3, -1.2, 0.9, 0.1]
REFERENCE = [0.0, 0.5, -0.4, 0.2]


def expected_gradient(estimator, *, behaviour):
    """Gradient [K] of the expected term with respect to logits, under the sampler `behaviour` over K tokens."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    reference = torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(0)
    case = loss_inputs(logprobs, behaviour.log(), [0.0] * 4, ref=reference, lengths=[1] * 4)
    case = replace(case, coefficients=behaviour)
    result = run_loss("reinforce", case, terms=Terms(kl_estimator=estimator, kl_coefficient=1.0))
    result.loss.backward()
    return result.loss.item(), logits.grad


def true_divergence():
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    policy, reference = logits.log_softmax(0), torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(0)
    value = (policy.exp() * (policy - reference)).sum()
    value.backward()
    return value.item(), logits.grad


ON_POLICY = torch.tensor(LOGITS, dtype=torch.float64).softmax(0)
OFF_POLICY = torch.tensor([0.4, 0.2, 0.2, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_unbiased"])
def test_an_estimator_has_the_divergence_as_its_mean_on_policy(estimator):
    assert expected_gradient(estimator, behaviour=ON_POLICY)[0] == pytest.approx(true_divergence()[0])


def test_k2_has_the_gradient_of_the_divergence_on_policy():
    torch.testing.assert_close(expected_gradient("k2", behaviour=ON_POLICY)[1], true_divergence()[1])


@pytest.mark.parametrize("behaviour", [ON_POLICY, OFF_POLICY], ids=["on policy", "off policy"])
def test_the_unbiased_estimator_has_value_and_gradient_of_the_divergence_on_and_off_policy(behaviour):
    value, gradient = expected_gradient("k3_unbiased", behaviour=behaviour)
    expected = true_divergence()
    assert value == pytest.approx(expected[0])
    torch.testing.assert_close(gradient, expected[1])


def test_the_other_estimators_are_biased_off_policy():
    for estimator in ("k1", "k2", "k3"):
        assert not torch.allclose(
            expected_gradient(estimator, behaviour=OFF_POLICY)[1], true_divergence()[1], atol=1e-2
        )


def test_the_coefficient_and_the_shares_weight_the_divergence_and_the_correction_does_not():
    inputs = loss_inputs([-1.0, -2.0], [-1.0, -2.0], [0.0, 0.0], ref=[-1.5, -1.0], lengths=[1, 1])
    result = run_loss("reinforce", inputs, weights=[0.0, 0.0], terms=Terms(kl_estimator="k2", kl_coefficient=0.5))
    assert result.loss.item() == pytest.approx(0.5 * (0.125 + 0.5) / 2)
    assert float(result.metrics["actor/kl_loss"]) == pytest.approx((0.125 + 0.5) / 2)


def test_k3_is_bounded_for_tokens_that_one_policy_excludes():
    far = divergence(torch.tensor([-90.0, -0.1]), torch.tensor([-0.1, -90.0]), estimator="k3")
    assert torch.isfinite(far).all()
    assert far[0].item() == pytest.approx(math.exp(20.0) - 21.0)


def test_in_the_reward_k3_of_a_token_is_at_most_10_and_other_estimators_are_as_in_the_loss():
    logprobs, reference = torch.tensor([-15.0, -90.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -1.5, -20.0])
    for estimator in ("k1", "k2", "k3"):
        unbounded = divergence(logprobs, reference, estimator=estimator).tolist()
        tokens, bounded = reward_term(logprobs, reference, estimator=estimator)
        is_k3 = estimator == "k3"
        assert tokens.tolist() == ([min(value, 10.0) for value in unbounded] if is_k3 else unbounded)
        assert bounded.tolist() == [is_k3 and value > 10 for value in unbounded]
        assert not is_k3 or bounded.tolist() == [True, True, False, True]


def test_an_adaptive_entropy_bonus_counts_below_the_target_only():
    algorithm = AlgorithmConfig(entropy={"target": 0.5, "coefficient": 0.01, "change": 0.02, "max_coefficient": 0.04})
    coefficients, bonuses = Coefficients.first(algorithm), []
    for entropy in (0.4, 0.3, 0.3, 0.6, 0.6, 0.4):
        bonuses.append(coefficients.entropy_bonus)
        coefficients = coefficients.next(algorithm, kl=None, entropy=entropy, num_responses=8)
    assert bonuses == pytest.approx([0.01, 0.03, 0.04, 0.04, 0.0, 0.0])
    assert coefficients.entropy_bonus == pytest.approx(0.02)


def test_coefficients_are_fixed_without_targets():
    algorithm = AlgorithmConfig(entropy={"coefficient": 0.01}, kl={"place": "loss", "coefficient": 0.02})
    first = Coefficients.first(algorithm)
    assert first.next(algorithm, kl=9.0, entropy=9.0, num_responses=999) == first


def test_a_step_of_many_responses_changes_the_coefficient_of_the_divergence_by_a_fifth_at_most():
    """More responses than five horizons, after a first step whose policy still is the reference."""
    kl = {"place": "loss", "coefficient": 0.001, "target": 0.01, "horizon": 1600}
    algorithm = AlgorithmConfig(kl=kl)
    coefficients, found = Coefficients.first(algorithm), []
    for measured in (0.0, 0.0095, 50.0, 50.0):
        coefficients = coefficients.next(algorithm, kl=measured, entropy=None, num_responses=8192)
        found.append(coefficients.kl)
    assert found == pytest.approx([0.0008, 0.00076, 0.000912, 0.0010944])


def test_restored_coefficients_continue_where_they_adapt_and_follow_the_configuration_elsewhere():
    saved = AlgorithmConfig(kl={"place": "loss", "target": 0.1, "coefficient": 0.02}, entropy={"coefficient": 0.01})
    later = Coefficients.first(saved).next(saved, kl=9.0, entropy=1.0, num_responses=1000)
    now = saved.model_copy(update={"entropy": saved.entropy.model_copy(update={"coefficient": 0.07})})
    restored = Coefficients.first(now).restored(now, later.state_dict(saved))
    assert (restored.kl, restored.entropy) == (later.kl, 0.07)
    assert restored.kl == pytest.approx(0.02 * 1.02)


@pytest.mark.parametrize("further", [{}, {"kl_start": 0.02, "kl_target": 0.1}])
def test_a_coefficient_that_an_earlier_version_has_set_to_0_begins_anew(further: dict[str, float]) -> None:
    now = AlgorithmConfig(kl={"place": "loss", "target": 0.1, "coefficient": 0.02})
    state = {"kl": 0.0, "entropy": 0.0, "is_entropy_low": 0.0, **further}
    assert Coefficients.first(now).restored(now, state).kl == 0.02


KL_ADAPTS = {"place": "loss", "coefficient": 0.05, "target": 0.02}
ENTROPY_ADAPTS = {"coefficient": 0.01, "target": 0.5}


@pytest.mark.parametrize(
    ("kl", "entropy"),
    [
        ({"place": "none"}, {}),
        ({"place": "none", "coefficient": 0.05, "target": 0.02}, {"coefficient": 0.01}),
        ({"place": "loss", "coefficient": 0.0}, {"coefficient": 0.02, "target": 0.5}),
        ({"place": "loss", "coefficient": 0.001, "target": 0.02}, {"coefficient": 0.0, "target": 0.5}),
    ],
    ids=["off", "fixed", "other values", "another start"],
)
def test_a_coefficient_that_did_not_adapt_from_the_configured_start_begins_there(kl, entropy):
    before = AlgorithmConfig.model_validate({"kl": kl, "entropy": entropy})
    saved = Coefficients.first(before).next(before, kl=9.0, entropy=0.9, num_responses=1000).state_dict(before)
    now = AlgorithmConfig.model_validate({"kl": KL_ADAPTS, "entropy": ENTROPY_ADAPTS})
    assert Coefficients.first(now).restored(now, saved) == Coefficients.first(now)


def test_adapted_coefficients_go_on_also_with_another_target_and_from_a_checkpoint_of_an_earlier_version():
    before = AlgorithmConfig.model_validate({"kl": KL_ADAPTS, "entropy": ENTROPY_ADAPTS})
    later = Coefficients.first(before).next(before, kl=9.0, entropy=0.9, num_responses=1000)
    assert later.kl == pytest.approx(0.05 * 1.02) and not later.is_entropy_low
    state = later.state_dict(before)
    now = AlgorithmConfig.model_validate({"kl": {**KL_ADAPTS, "target": 0.1}, "entropy": ENTROPY_ADAPTS})
    assert Coefficients.first(now).restored(now, state) == later
    earlier = {name: state[name] for name in ("kl", "entropy", "is_entropy_low")}
    assert Coefficients.first(now).restored(now, earlier) == later
