"""Losses: value and gradient against five-line references, in double precision."""

import decimal
import itertools
import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.objective import Terms, sft_loss
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm_settings import LOSSES
from megatron_rl.stages import PlugIn
from tests.support.loss_inputs import choice, column, loss_inputs, run_loss, shares

DAPO_CLIP = {"name": "clipped_surrogate", "clip_low": 0.2, "clip_high": 0.28}
LENGTHS = (7, 1, 12)
OF = [slice(0, 7), slice(7, 8), slice(8, 20)]
ON_POLICY = [name for name in LOSSES.by_name if name != "bypass"]


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def clip(x, low, high):
    return min(max(x, low), high)


def surrogate(new, old, a, low=0.2, high=0.2, dual=0.0):
    ratio = math.exp(new - old)
    objective = min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    return -(max(objective, dual * a) if dual and a < 0 else objective)


def dppo_reference(new, old, a, *, kl, bound=0.05, cap=2.0):
    p, q = math.exp(new), math.exp(old)
    moved = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if kl else abs(p - q)
    masked = moved > bound and (p > q) == (a > 0)
    return 0.0 if masked else -min(p / q, cap) * a * new


PER_TOKEN = {
    "clipped": ({**DAPO_CLIP, "dual_clip": 3.0}, lambda n, o, r, a: surrogate(n, o, a, 0.2, 0.28, 3.0)),
    "bypass": ({"name": "bypass"}, lambda n, o, r, a: surrogate(n, r, a)),
    "cispo": (
        {"name": "cispo", "clip_low": 1.0, "clip_high": 0.3},
        lambda n, o, r, a: -clip(math.exp(n - o), 0, 1.3) * a * n,
    ),
    "sapo": (
        {"name": "sapo", "tau_negative": 2.0},
        lambda n, o, r, a: -a * (t := 1.0 if a > 0 else 2.0) ** -1 * 4 * sigmoid(t * (math.exp(n - o) - 1)),
    ),
    "dppo tv": (
        {"name": "dppo", "bound_low": 0.05, "bound_high": 0.05, "ratio_cap": 2.0},
        lambda n, o, r, a: dppo_reference(n, o, a, kl=False),
    ),
    "dppo kl": (
        {"name": "dppo", "divergence": "kl", "bound_low": 0.05, "bound_high": 0.05, "ratio_cap": 2.0},
        lambda n, o, r, a: dppo_reference(n, o, a, kl=True),
    ),
    "reinforce": ({"name": "reinforce"}, lambda n, o, r, a: -a * n),
}
DETACHED_RATIO = ("cispo", "dppo tv", "dppo kl")
"""Losses in which the gradient is that of the log-probability alone."""


def gspo_reference(new, old, a):
    """Of one sequence."""
    ratio = math.exp((new - old).mean())
    return -min(ratio * a, clip(ratio, 1 - 3e-4, 1 + 4e-4) * a)


def gmpo_reference(new, old, a):
    """Of one sequence."""
    logs = [min(x, 0.4) if a > 0 else max(x, -0.4) for x in new - old]
    return -math.exp(sum(logs) / len(logs)) * a


PER_SEQUENCE = {"gspo": gspo_reference, "gmpo": gmpo_reference}


def tokens(seed, spread=0.4):
    """Log-probabilities now, old and of the sampler, and advantages of sequences for each token."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1, sum(LENGTHS)) - 0.01
    new = np.minimum(old + rng.normal(0, spread, len(old)), -0.001)
    return new, old, old + rng.normal(0, 0.05, len(old)), np.repeat(rng.normal(0, 1, len(LENGTHS)), LENGTHS)


def double(values, *, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def slopes(function, point):
    """Central differences of a function of many numbers."""
    steps = np.eye(len(point)) * 1e-6
    return [(function(point + step) - function(point - step)) / 2e-6 for step in steps]


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("seed", range(4))
def test_the_value_and_the_slope_of_a_loss_of_tokens_are_the_references(name, seed):
    loss, reference = PER_TOKEN[name]
    new, old, rollout, advantages = tokens(seed)
    weights = np.random.default_rng(seed).uniform(0, 2, len(new))

    def naive(values):
        return sum(
            w * reference(n, o, r, a) for n, o, r, a, w in zip(values, old, rollout, advantages, weights, strict=True)
        ) / len(values)

    logprobs = double(new, grad=True)
    case = loss_inputs(logprobs, double(old), double(advantages), rollout=double(rollout), lengths=LENGTHS)
    result = run_loss(loss, case, weights=double(weights))
    assert result.loss.item() == pytest.approx(naive(new), rel=1e-6)
    result.loss.backward()
    if name in DETACHED_RATIO:
        expected = [
            w * reference(n, o, r, a) / n / len(new)
            for n, o, r, a, w in zip(new, old, rollout, advantages, weights, strict=True)
        ]
    else:
        expected = slopes(naive, new)
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", PER_SEQUENCE)
@pytest.mark.parametrize("seed", range(4))
def test_the_value_and_the_slope_of_a_loss_of_sequences_are_the_references(name, seed):
    new, old, _, advantages = tokens(seed, spread=0.5 if name == "gmpo" else 3e-4)

    def naive(values):
        return sum(PER_SEQUENCE[name](values[part], old[part], advantages[part][0]) for part in OF) / len(OF)

    logprobs = double(new, grad=True)
    case = loss_inputs(logprobs, double(old), double(advantages), lengths=LENGTHS, aggregation="sequence_mean")
    result = run_loss(name, case)
    assert result.loss.item() == pytest.approx(naive(new), rel=1e-6)
    result.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx(slopes(naive, new), rel=1e-4, abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), dual_clip=st.sampled_from([0.0, 1.5, 3.0]))
def test_the_surrogate_equals_its_reference_for_any_tokens(seed, dual_clip):
    new, old, _, advantages = tokens(seed, spread=1.0)
    expected = [surrogate(n, o, a, 0.2, 0.28, dual_clip) for n, o, a in zip(new, old, advantages, strict=True)]
    result = run_loss({**DAPO_CLIP, "dual_clip": dual_clip}, loss_inputs(new, old, advantages))
    assert result.loss.item() == pytest.approx(np.mean(expected), rel=1e-4, abs=1e-6)
    assert float(result.metrics["actor/pg_loss"]) == result.loss.item()


def test_bounds_bind_separately_and_are_counted():
    # ratio 1.5 with A > 0 is clipped at 1.28; ratio 0.5 with A < 0 at 0.8; the other two keep their gradient.
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5]).log().requires_grad_()
    result = run_loss(DAPO_CLIP, loss_inputs(logprobs, [0.0] * 4, [1.0, -1.0, -1.0, 1.0]))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.28 - 0.8 - 1.5 + 0.5) / 4)
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 1.5 / 4, -0.5 / 4])
    assert float(result.metrics["actor/pg_clipfrac"]) == 0.5
    assert float(result.metrics["actor/ppo_kl"]) == pytest.approx(-np.log([1.5, 0.5, 1.5, 0.5]).mean())


def test_the_dual_clip_bounds_the_loss_of_one_bad_token():
    logprobs = torch.tensor([10.0]).log().requires_grad_()
    result = run_loss({"name": "clipped_surrogate", "dual_clip": 3.0}, loss_inputs(logprobs, [0.0], [-1.0]))
    result.loss.backward()
    assert result.loss.item() == 3.0
    assert logprobs.grad.tolist() == [0.0]
    assert float(result.metrics["actor/pg_clipfrac_lower"]) == 1.0


@pytest.mark.parametrize("loss", LOSSES.by_name)
def test_on_policy_the_gradient_is_minus_share_times_weight_times_advantage(loss):
    old, advantages, weights = [-1.0, -2.0, -0.5, -3.0], [1.0, 1.0, -2.0, -2.0], [1.0, 0.5, 0.0, 2.0]
    if loss == "gmpo":  # the gradient of a sequence's ratio is spread over its tokens
        weights = [0.5, 0.5, 2.0, 2.0]
    logprobs = column(old).requires_grad_()
    case = loss_inputs(logprobs, old, advantages, lengths=[2, 2], aggregation="sequence_mean")
    run_loss(loss, case, weights=weights).loss.backward()
    expected = -np.array([0.25] * 4) * weights * advantages
    assert logprobs.grad.tolist() == pytest.approx(expected.tolist())


def test_gspo_has_the_gradient_of_the_sequence_ratio():
    old = column([-1.0, -2.0, -0.5])
    logprobs = (old + column([1e-4, -2e-4, 5e-4])).requires_grad_()
    case = loss_inputs(logprobs, old, [2.0] * 3, aggregation="sequence_mean")
    run_loss("gspo", case).loss.backward()
    free = logprobs.detach().clone().requires_grad_()
    (-(free - old).mean().exp() * 2.0).backward()
    torch.testing.assert_close(logprobs.grad, free.grad)


def test_cispo_keeps_a_gradient_where_the_surrogate_has_none():
    logprobs = torch.tensor([1.5]).log().requires_grad_()
    run_loss({"name": "cispo", "clip_high": 0.28}, loss_inputs(logprobs, [0.0], [1.0])).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.28])


SURE = [0.0, -2e-8, -1.2e-7, -1e-4]
"""Log-probabilities of a token that the policy is sure of; in float32, the probabilities of some are 1."""


@pytest.mark.parametrize(("old", "new"), list(itertools.product([*SURE, -0.5], repeat=2)))
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_token_near_the_probability_1_has_its_true_divergence(old, new, factor):
    """The bounds lie on both sides of the divergence by exact arithmetic, with 0 as the nearest probability to 1."""
    old, new = np.float32(old), np.float32(new)
    moved = exact_binary_kl(min(float(old), -1e-8), min(float(new), -1e-8))
    advantage, bound = math.copysign(1.0, new - old), max(moved, 1e-12) * factor
    loss = {"name": "dppo", "divergence": "kl", "bound_low": bound, "bound_high": bound}
    logprobs = torch.tensor([new], requires_grad=True)
    result = run_loss(loss, loss_inputs(logprobs, [old], [advantage]))
    result.loss.backward()
    assert float(result.metrics["actor/pg_clipfrac"]) == (moved > bound)
    assert logprobs.grad.item() == pytest.approx(0.0 if moved > bound else -advantage * math.exp(new - old))


def exact_binary_kl(old, new):
    """With 60 digits."""
    with decimal.localcontext(prec=60):
        p, q = (Decimal(value).exp() for value in (old, new))
        return float(p * (p / q).ln() + (1 - p) * ((1 - p) / (1 - q)).ln())


def test_the_entropy_bonus_is_the_token_mean_of_the_entropy():
    entropy = column([1.0, 2.0, 6.0]).requires_grad_()
    case = loss_inputs([-1.0] * 3, [-1.0] * 3, [0.0] * 3, entropy=entropy, lengths=[2, 1])
    result = run_loss("clipped_surrogate", case, terms=Terms(entropy_coefficient=0.1))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-0.3)
    assert float(result.metrics["actor/entropy"]) == pytest.approx(3.0)
    assert entropy.grad.tolist() == pytest.approx([-0.1 / 3] * 3)


@pytest.mark.parametrize("loss", LOSSES.by_name)
def test_an_empty_micro_batch_gives_zero_loss_and_zero_gradient(loss):
    parameter = torch.ones(5, requires_grad=True)
    nothing = torch.zeros(0)
    logprobs = parameter[torch.zeros(0, dtype=torch.int64)]
    result = run_loss(loss, loss_inputs(logprobs, nothing, nothing, lengths=[], aggregation="sequence_mean"))
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert parameter.grad.tolist() == [0.0] * 5


def test_the_supervised_loss_is_the_mean_negative_logprob():
    means = shares(torch.tensor([2, 1]), aggregation="token_mean")
    assert float(sft_loss(column([-1.0, -2.0, -6.0]), coefficients=means).loss) == pytest.approx(3.0)


def test_a_users_loss_is_loaded_by_its_dotted_path():
    path = "benchmarks.learning.coarse_codes.clipped_surrogate"
    loaded = load_stage(LOSSES, PlugIn(name=path, clip_high=0.5))
    settings = loaded.function.keywords["settings"]
    assert (settings.clip_low, settings.clip_high) == (0.2, 0.5)
    with pytest.raises(ValueError, match=r"algorithm\.loss.*did you mean 'clipped_surrogate'"):
        load_stage(LOSSES, PlugIn(name="benchmarks.learning.coarse_codes.clipped_surogate"))
    with pytest.raises(ValueError, match=r"unknown key `algorithm\.loss\.clip_hgh`; did you mean `clip_high`\?"):
        load_stage(LOSSES, PlugIn(name=path, clip_hgh=0.5))


def test_a_loss_that_returns_a_mean_is_refused(monkeypatch):
    inputs = loss_inputs([-1.0] * 3, [-1.0] * 3, [0.0] * 3)
    with pytest.raises(ValueError, match=r"losses of shape \(\) for 3 tokens; return one loss for each token"):
        run_loss("tests.megatron_rl.algorithm.own_functions.mean", inputs)


def test_a_column_that_no_function_declares_is_refused():
    with pytest.raises(RuntimeError, match=r"reads the column `ref`, but none declares it.*`@needs\('ref'\)`"):
        run_loss("tests.megatron_rl.algorithm.own_functions.undeclared", loss_inputs([-1.0], [-1.0], [0.0]))


def test_an_unknown_short_name_of_a_loss_is_refused_naming_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean `cispo`"):
        choice(loss="cipso")
