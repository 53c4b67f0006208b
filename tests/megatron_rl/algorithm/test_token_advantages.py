"""Advantages of tokens against loops over single tokens, whitening under any split, and masked tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.columns import Columns
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm.token_advantages import TokenOutcome, terminal_rewards, whitened, whitening_sums
from megatron_rl.algorithm_settings import ADVANTAGES
from tests.support.loss_inputs import choice


def outcome(rewards, lengths, *, values=None, mask=None):
    tokens = len(rewards)
    return TokenOutcome(
        rewards=torch.tensor(rewards),
        old_logprobs=torch.zeros(tokens),
        rollout_logprobs=torch.zeros(tokens),
        loss_mask=torch.ones(tokens, dtype=torch.bool) if mask is None else torch.tensor(mask),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        further=Columns(tensors={} if values is None else {"values": torch.tensor(values)}),
    )


def advantage(stage, inputs):
    return load_stage(ADVANTAGES, choice(advantage=stage)).function(inputs)


def gae_loop(rewards, values, mask, *, gamma, lam):
    """One sequence, backward token by token; a masked token hands on what comes after it."""
    following, running, result = 0.0, 0.0, []
    for reward, value, sampled in reversed(list(zip(rewards, values, mask, strict=True))):
        if sampled:
            running = reward + gamma * following - value + gamma * lam * running
            following = value
        result.append(running)
    return result[::-1]


def draw(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 5)
    tokens = int(lengths.sum())
    mask = rng.random(tokens) < 0.7
    mask[np.cumsum(lengths) - 1] = True
    return rng.normal(0, 1, tokens), rng.normal(0, 1, tokens), mask, lengths.tolist()


def parts(lengths):
    ends = np.cumsum(lengths)
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_a_loop_over_the_tokens_of_each_sequence(seed, gamma, lam):
    rewards, values, mask, lengths = draw(seed)
    stage = {"name": "gae", "gamma": gamma, "lam": lam, "whiten": False}
    result = advantage(stage, outcome(rewards, lengths, values=values, mask=mask))
    expected = [
        each
        for part in parts(lengths)
        for each in gae_loop(rewards[part], values[part], mask[part], gamma=gamma, lam=lam)
    ]
    assert result.advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert (result.returns - result.advantages).tolist() == pytest.approx(values.tolist(), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_discounted_returns_are_sums_of_later_rewards(seed, gamma):
    rewards, _, mask, lengths = draw(seed)
    stage = {"name": "discounted_returns", "gamma": gamma, "whiten": False}
    result = advantage(stage, outcome(rewards, lengths, mask=mask))
    for part in parts(lengths):
        sampled = np.flatnonzero(mask[part])
        for place, index in enumerate(sampled):
            later = sampled[place:]
            expected = sum(gamma**distance * rewards[part][other] for distance, other in enumerate(later))
            assert float(result.advantages[part][index]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_without_discount_every_token_has_the_reward_of_its_response():
    rewards = terminal_rewards(torch.tensor([1.0, -2.0]), torch.tensor([3, 2]), 5)
    assert rewards.tolist() == [0.0, 0.0, 1.0, 0.0, -2.0]
    stage = {"name": "discounted_returns", "whiten": False}
    assert advantage(stage, outcome(rewards.tolist(), [3, 2])).advantages.tolist() == [1.0, 1.0, 1.0, -2.0, -2.0]


@pytest.mark.parametrize("name", ["discounted_returns", "gae"])
def test_an_empty_micro_batch_has_no_advantages(name):
    nothing = outcome(np.zeros(0), [], values=np.zeros(0))
    result = advantage(name, nothing)
    assert result.advantages.shape == result.returns.shape == (0,)
    assert whitening_sums(result.advantages, nothing.loss_mask).tolist() == [0.0, 0.0, 0.0]


def test_whitening_over_any_split_is_whitening_of_all_tokens():
    rewards, _, mask, _ = draw(3)
    values, sampled = torch.tensor(rewards), torch.tensor(mask)
    halves = [slice(0, 20), slice(20, None)]
    sums = sum(whitening_sums(values[half], sampled[half]) for half in halves)
    split = torch.cat([whitened(values[half], sums) for half in halves])
    kept = rewards[mask]
    expected = (rewards - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    assert split.tolist() == pytest.approx(expected, rel=1e-9)


def test_values_that_no_critic_gives_are_refused():
    with pytest.raises(RuntimeError, match="reads the column `values`, but none declares it"):
        advantage("gae", outcome([0.0], [1]))
