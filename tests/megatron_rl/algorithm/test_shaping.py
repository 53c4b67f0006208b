"""Reward shaping and filters against hand-computed numbers."""

import numpy as np
import pytest

from megatron_rl.algorithm.filters import GroupSignal
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm_settings import FILTERS, SHAPINGS
from tests.megatron_rl.algorithm.test_advantages import advantage, outcome
from tests.support.loss_inputs import choice


def shaped(stage, inputs):
    return load_stage(SHAPINGS, choice(reward_shaping=stage)).function(inputs).tolist()


def test_the_overlong_penalty_grows_linearly_over_the_buffer():
    stage = {"name": "overlong", "buffer_tokens": 20, "penalty": 2.0}
    assert shaped(stage, outcome([0] * 4, [80, 85, 90, 100])) == [0.0, -0.5, -1.0, -2.0]


def test_dapo_ranks_a_short_right_answer_above_one_at_the_length_limit():
    rewards = shaped({"name": "overlong", "buffer_tokens": 20, "penalty": 0.5}, outcome([1, 1, 0], [50, 100, 50]))
    values = advantage("grpo", outcome(rewards))
    assert values[0] > values[1] > values[2]


def test_the_length_penalty_is_in_proportion_to_the_length():
    assert shaped({"name": "length_penalty", "penalty": 0.5}, outcome([1, 0], [50, 100])) == [0.75, -0.5]


def test_the_relative_length_helps_the_shorter_right_answers_and_no_wrong_one():
    case = outcome([1, 1, 1, 0, 0], [10, 20, 30, 10, 30])
    assert shaped("relative_length", case) == [1.5, 1.0, 0.5, 0.0, -0.5]
    assert shaped("relative_length", outcome([1, 0], [7, 7])) == [1.0, 0.0]


def test_no_shaping_leaves_rewards():
    assert shaped("none", outcome([1, 0.5])) == [1.0, 0.5]


@pytest.mark.parametrize(("rewards", "kept"), [([0, 0], False), ([1, 1], False), ([0, 1], True), ([0.2, 0.2], True)])
def test_the_accuracy_lies_strictly_between_the_bounds(rewards, kept):
    assert load_stage(FILTERS, choice(filter="accuracy")).function(outcome(rewards)) is kept


def test_accuracies_count_and_not_rewards():
    function = load_stage(FILTERS, choice(filter="accuracy")).function
    assert function(outcome([-1, -1, 1, -1], accuracies=[0, 0, 1, 0]))
    assert not function(outcome([-1, -1.1], accuracies=[0, 0]))


def test_an_accuracy_may_be_rounded():
    function = load_stage(FILTERS, choice(filter="accuracy")).function
    right = 0.4 + 0.2 + 0.3 + 0.1
    assert right != 1
    assert function(outcome([right, 0]))
    assert not function(outcome([right, right])) and not function(outcome([-1e-17, 0]))


@pytest.mark.parametrize(("rewards", "outside"), [([1, -1], r"-1\.0"), ([2, 2], r"2\.0"), ([0.5, 1.25], "1.25")])
def test_a_reward_of_another_scale_is_refused_as_an_accuracy(rewards, outside):
    with pytest.raises(ValueError, match=f"accuracy {outside}, which is not between 0 and 1; .*return such an `acc`"):
        load_stage(FILTERS, choice(filter="accuracy")).function(outcome(rewards))


def test_a_signal_is_an_advantage_or_a_difference_of_rewards():
    function = load_stage(FILTERS, choice(filter="zero_variance")).function
    assert not function(GroupSignal(outcome=outcome([0, 1]), advantages=np.zeros(2)))
    assert function(GroupSignal(outcome=outcome([1, 1]), advantages=np.array([0.1, 0.1])))
    assert not function(GroupSignal(outcome=outcome([1, 1]), advantages=None))
    assert function(GroupSignal(outcome=outcome([0, 1]), advantages=None))
    assert not function(GroupSignal(outcome=outcome([0.1 + 0.2, 0.3]), advantages=None))
    assert function(GroupSignal(outcome=outcome([0.3, 0.3 + 1e-8]), advantages=None))
