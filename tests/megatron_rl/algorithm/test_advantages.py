"""Advantages against hand-computed numbers, and invariants of all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.learning.shuffled_rewards import shuffled_grpo
from megatron_rl.algorithm.advantages import (
    GroupOutcome,
    advantages,
    dapo,
    dr_grpo,
    grpo,
    load_advantage,
    overlong_punishment,
    rloo,
)
from megatron_rl.built_in import ADVANTAGES


def outcome(rewards, lengths=None, **settings):
    return GroupOutcome(
        rewards=np.array(rewards, dtype=np.float64),
        lengths=np.array(lengths or [1] * len(rewards), dtype=np.int64),
        max_response_tokens=100,
        **settings,
    )


def test_grpo_standardises_with_the_unbiased_deviation():
    # mean 0.25, unbiased variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25
    assert grpo(outcome([1, 0, 0, 0])) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_dr_grpo_only_subtracts_the_mean():
    assert dr_grpo(outcome([1, 0, 0, 0])).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_rloo_subtracts_the_mean_of_the_others():
    rewards = [1.0, 0.0, 0.5]
    expected = [r - np.mean([o for j, o in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)]
    assert rloo(outcome(rewards)) == pytest.approx(expected)


def test_dapo_without_a_buffer_is_grpo():
    case = outcome([1, 0, 0, 1], [3, 100, 7, 90])
    assert np.array_equal(dapo(case), grpo(case))


def test_the_overlong_punishment_grows_linearly_over_the_buffer():
    case = outcome([0] * 4, [80, 85, 90, 100], overlong_buffer_tokens=20, overlong_penalty=2.0)
    assert overlong_punishment(case).tolist() == [0.0, 0.5, 1.0, 2.0]


def test_dapo_ranks_a_short_right_answer_above_one_at_the_length_limit():
    values = dapo(outcome([1, 1, 0], [50, 100, 50], overlong_buffer_tokens=20, overlong_penalty=0.5))
    assert values[0] > values[1] > values[2]


@given(rewards=st.lists(st.floats(-10, 10), min_size=1, max_size=16), function=st.sampled_from([grpo, dr_grpo, rloo]))
def test_advantages_are_finite_sum_to_zero_and_follow_a_permutation(rewards, function):
    values = function(outcome(rewards))
    assert np.isfinite(values).all()
    assert values.sum() == pytest.approx(0.0, abs=1e-6 * (1 + np.abs(values).sum()))
    assert function(outcome(rewards[::-1])) == pytest.approx(values[::-1], abs=1e-6, rel=1e-6)


@given(reward=st.floats(-10, 10), size=st.integers(1, 9), function=st.sampled_from([grpo, dr_grpo, rloo, dapo]))
def test_equal_rewards_give_no_advantage(reward, size, function):
    assert function(outcome([reward] * size)) == pytest.approx([0.0] * size, abs=1e-8)


def test_every_built_in_advantage_is_loaded_by_its_short_name():
    assert [load_advantage(name) for name in ADVANTAGES.names] == [grpo, dr_grpo, rloo, dapo]


def test_a_users_advantage_is_loaded_by_its_dotted_path_and_a_wrong_path_names_the_nearest():
    assert load_advantage("benchmarks.learning.shuffled_rewards.shuffled_grpo") is shuffled_grpo
    with pytest.raises(ValueError, match=r"algorithm\.advantage.*has no 'shufled_grpo'.*did you mean 'shuffled_grpo'"):
        load_advantage("benchmarks.learning.shuffled_rewards.shufled_grpo")
    with pytest.raises(ValueError, match=r"cannot import module 'nowhere'"):
        load_advantage("nowhere.grpo")
    with pytest.raises(ValueError, match="a function is needed"):
        load_advantage("megatron_rl.algorithm.advantages.STD_EPS")


def test_an_unknown_short_name_of_an_advantage_is_refused_naming_the_nearest():
    with pytest.raises(ValueError, match=r"algorithm\.advantage = 'grop': .*did you mean `grpo`"):
        load_advantage("grop")


@pytest.mark.parametrize("module", ["megatron_rl.advantages", "megatron_rl.algorithm.advantages"])
def test_a_dotted_path_of_a_built_in_advantage_is_refused_with_its_short_name(module):
    with pytest.raises(ValueError, match="write `rloo`"):
        load_advantage(f"{module}.rloo")


def test_a_function_with_the_wrong_number_of_values_is_refused():
    with pytest.raises(ValueError, match="one number per response"):
        advantages(lambda case: case.rewards[:1], outcome([0, 1]))
    with pytest.raises(ValueError, match="nan"):
        advantages(lambda case: case.rewards * np.nan, outcome([0, 1]))
