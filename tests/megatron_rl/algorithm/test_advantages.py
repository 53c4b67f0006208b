"""Advantages of the controller against hand-computed numbers, and invariants of all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.learning.shuffled_rewards import shuffled_grpo
from megatron_rl.algorithm.advantages import BatchOutcome, GroupOutcome, checked
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm_settings import ADVANTAGES
from megatron_rl.stages import PlugIn
from tests.support.loss_inputs import choice

OF_GROUP = ["grpo", "dr_grpo", "rloo", "opo"]
OF_BATCH = ["reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def outcome(rewards, lengths=None, *, accuracies=None):
    return GroupOutcome(
        rewards=np.array(rewards, dtype=np.float64),
        accuracies=np.array(rewards if accuracies is None else accuracies, dtype=np.float64),
        lengths=np.array(lengths or [1] * len(rewards), dtype=np.int64),
        max_response_tokens=100,
    )


def advantage(name, inputs):
    return load_stage(ADVANTAGES, choice(advantage=name)).function(inputs)


def test_grpo_standardises_with_the_unbiased_deviation():
    # mean 0.25, unbiased variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25
    assert advantage("grpo", outcome([1, 0, 0, 0])) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_dr_grpo_only_subtracts_the_mean():
    assert advantage("dr_grpo", outcome([1, 0, 0, 0])).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_rloo_subtracts_the_mean_of_the_others():
    rewards = [1.0, 0.0, 0.5]
    expected = [r - np.mean([o for j, o in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)]
    assert advantage("rloo", outcome(rewards)) == pytest.approx(expected)


def test_opo_subtracts_the_mean_over_tokens():
    # 30 tokens with reward 1 and 10 with 0: the baseline is 0.75
    assert advantage("opo", outcome([1, 0], [30, 10])).tolist() == [0.25, -0.75]


@pytest.mark.parametrize("name", OF_BATCH)
def test_an_advantage_of_a_batch_is_standardised_over_its_tokens(name):
    groups = (outcome([1.0, 0.0, 0.5], [4, 2, 9]), outcome([0.0, 0.0], [3, 5]))
    values = advantage(name, BatchOutcome(groups=groups))
    rewards = [[1.0, 0.0, 0.5], [0.0, 0.0]]
    if name.endswith("baseline"):
        rewards = [np.array(group) - np.mean(group) for group in rewards]
    tokens = np.repeat(np.concatenate(rewards), [4, 2, 9, 3, 5])
    expected = (np.concatenate(rewards) - tokens.mean()) / tokens.std(ddof=1)
    assert values == pytest.approx(expected, rel=1e-6)
    assert np.repeat(values, [4, 2, 9, 3, 5]).mean() == pytest.approx(0.0, abs=1e-12)


@given(rewards=st.lists(st.floats(-10, 10), min_size=1, max_size=16), name=st.sampled_from(OF_GROUP[:3]))
def test_advantages_are_finite_sum_to_zero_and_follow_a_permutation(rewards, name):
    values = advantage(name, outcome(rewards))
    assert np.isfinite(values).all()
    assert values.sum() == pytest.approx(0.0, abs=1e-6 * (1 + np.abs(values).sum()))
    assert advantage(name, outcome(rewards[::-1])) == pytest.approx(values[::-1], abs=1e-6, rel=1e-6)


@given(reward=st.floats(-10, 10), size=st.integers(1, 9), name=st.sampled_from(OF_GROUP))
def test_equal_rewards_give_no_advantage(reward, size, name):
    assert advantage(name, outcome([reward] * size)) == pytest.approx([0.0] * size, abs=1e-8)


def test_a_users_advantage_is_loaded_by_its_dotted_path_and_a_wrong_path_names_the_nearest():
    own = "benchmarks.learning.shuffled_rewards.shuffled_grpo"
    assert load_stage(ADVANTAGES, PlugIn(name=own)).function.func is shuffled_grpo
    with pytest.raises(ValueError, match=r"algorithm\.advantage.*has no 'shufled_grpo'.*did you mean 'shuffled_grpo'"):
        load_stage(ADVANTAGES, PlugIn(name="benchmarks.learning.shuffled_rewards.shufled_grpo"))
    with pytest.raises(ValueError, match=r"cannot import module 'nowhere'"):
        load_stage(ADVANTAGES, PlugIn(name="nowhere.grpo"))
    with pytest.raises(ValueError, match="a function is needed"):
        load_stage(ADVANTAGES, PlugIn(name="benchmarks.learning.coarse_codes.STEP"))


@pytest.mark.parametrize("module", ["megatron_rl.advantages", "megatron_rl.algorithm.advantages"])
def test_a_dotted_path_of_a_built_in_advantage_is_refused_with_its_short_name(module):
    with pytest.raises(ValueError, match="write `rloo`"):
        choice(advantage=f"{module}.rloo")


@pytest.mark.parametrize("former", ["dapo", "megatron_rl.algorithm.advantages.dapo"])
def test_the_former_name_of_dapo_is_refused_with_its_two_stages(former):
    with pytest.raises(ValueError, match=r"write `grpo`, and set `algorithm\.reward_shaping` to overlong"):
        choice(advantage=former)


@pytest.mark.parametrize(("name", "said"), [("first", "one number per response"), ("not_numbers", "nan")])
def test_a_function_with_wrong_values_is_refused(name, said):
    function = load_stage(ADVANTAGES, PlugIn(name=f"tests.megatron_rl.algorithm.own_functions.{name}")).function
    case = outcome([0, 1])
    with pytest.raises(ValueError, match=said):
        checked(function(case), case.rewards, key=ADVANTAGES.key)
