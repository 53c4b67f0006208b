"""Metrics of the rewards of a step."""

from dataclasses import replace

import pytest

from megatron_rl.controller.step_metrics import _rewards
from rollout.types import Score, ScoreStatus
from tests.support.scored_groups import scored_group


def test_further_numbers_of_the_reward_function_are_averaged_over_the_responses_that_have_them() -> None:
    first, second = scored_group(1, num_samples=2), scored_group(2, num_samples=2)
    details = ((("parsed", 1.0), ("steps", 4.0)), (("parsed", 0.0),), (("parsed", 1.0), ("steps", 8.0)), ())
    scores = [Score(reward=1.0, status=ScoreStatus.OK, details=each) for each in details]
    groups = [replace(first, scores=tuple(scores[:2])), replace(second, scores=tuple(scores[2:]))]
    metrics = _rewards(groups)
    assert metrics["reward/detail/parsed"] == pytest.approx(2 / 3)
    assert metrics["reward/detail/steps"] == 6.0
    assert not any(name.startswith("reward/detail") for name in _rewards([first, second]))
