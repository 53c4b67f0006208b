"""A few steps of a tiny policy: every loss and every advantage raise the chance of what is rewarded.

The policy is a softmax over 6 tokens at each of 4 places. A response is rewarded by the share of its tokens that are 0.
"""

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantages import BatchOutcome, GroupOutcome
from megatron_rl.algorithm.columns import Columns
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm.token_advantages import TokenOutcome, terminal_rewards, whitened, whitening_sums
from megatron_rl.algorithm_settings import ADVANTAGES, LOSSES
from tests.support.loss_inputs import choice, loss_inputs, run_loss

TOKENS, PLACES, RESPONSES, STEPS = 6, 4, 64, 12
START = 1.0 / TOKENS


def advantages_of(name, rewards):
    """[T] for responses of `PLACES` tokens."""
    loaded = load_stage(ADVANTAGES, choice(advantage=name))
    lengths = np.full(RESPONSES, PLACES)
    group = GroupOutcome(rewards=rewards, accuracies=rewards, lengths=lengths, max_response_tokens=PLACES)
    if loaded.inputs is GroupOutcome:
        return torch.tensor(loaded.function(group)).repeat_interleave(PLACES)
    if loaded.inputs is BatchOutcome:
        return torch.tensor(loaded.function(BatchOutcome(groups=(group,)))).repeat_interleave(PLACES)
    tokens, lengths = torch.zeros(RESPONSES * PLACES), torch.tensor(lengths)
    outcome = TokenOutcome(
        rewards=terminal_rewards(torch.tensor(rewards), lengths, len(tokens)),
        old_logprobs=tokens,
        rollout_logprobs=tokens,
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        lengths=lengths,
        further=Columns(tensors={"values": torch.full_like(tokens, float(rewards.mean()), dtype=torch.float64)}),
    )
    result = loaded.function(outcome).advantages
    return whitened(result, whitening_sums(result, outcome.loss_mask))


def chance_after(loss, advantage, *, updates=2, rate=4.0):
    """Mean probability of the rewarded token after some steps of two updates each."""
    rng = np.random.default_rng(0)
    logits = torch.zeros(PLACES, TOKENS, dtype=torch.float64, requires_grad=True)
    for _ in range(STEPS):
        policy = logits.detach().softmax(1).numpy()
        drawn = np.stack([rng.choice(TOKENS, size=RESPONSES, p=policy[place]) for place in range(PLACES)], axis=1)
        rewards = (drawn == 0).mean(axis=1)
        picked = torch.tensor(drawn)
        old = logits.detach().log_softmax(1)[torch.arange(PLACES), picked].flatten()
        for _ in range(updates):
            now = logits.log_softmax(1)[torch.arange(PLACES), picked].flatten()
            case = loss_inputs(
                now, old, advantages_of(advantage, rewards), lengths=[PLACES] * RESPONSES, aggregation="sequence_mean"
            )
            run_loss(loss, case).loss.backward()
            with torch.no_grad():
                logits -= rate * logits.grad
            logits.grad = None
    return float(logits.detach().softmax(1)[:, 0].mean())


@pytest.mark.parametrize("loss", LOSSES.by_name)
def test_a_loss_raises_the_chance_of_what_is_rewarded(loss):
    rate = 1.0 if loss in ("reinforce", "cispo") else 4.0
    assert chance_after(loss, "grpo", rate=rate) > 2 * START


@pytest.mark.parametrize("advantage", ADVANTAGES.by_name)
def test_an_advantage_raises_the_chance_of_what_is_rewarded(advantage):
    assert chance_after("clipped_surrogate", advantage) > 2 * START


def test_a_reversed_reward_lowers_the_chance():
    """The control: the same code with opposite advantages."""
    original = choice(advantage="grpo")
    function = load_stage(ADVANTAGES, original).function
    rewards, lengths = np.array([1.0, 0.0]), np.array([1, 1])
    group = GroupOutcome(rewards=rewards, accuracies=rewards, lengths=lengths, max_response_tokens=1)
    logits = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    now = logits.log_softmax(1)[0]
    run_loss("clipped_surrogate", loss_inputs(now, now.detach(), -function(group), lengths=[1, 1])).loss.backward()
    assert logits.grad[0, 0] > 0 > logits.grad[0, 1]
