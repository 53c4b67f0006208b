"""Metrics of the rewards and of the speed of a step."""

from dataclasses import replace

import pytest

from megatron_rl.controller.step_metrics import _rewards, _speed
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


@pytest.mark.parametrize(
    ("rollout_s", "tokens_s"),
    [(100.0, 12.0), (99.0, 1200 / 99), (90.0, None), (1e-3, None), (0.0, None)],
    ids=["in the phase", "begun just before it", "a tenth ahead", "ahead", "all ahead"],
)
def test_a_batch_that_was_not_sampled_in_the_rollout_has_no_rollout_speed(
    rollout_s: float, tokens_s: float | None
) -> None:
    """The first group starts at 1000 s, the last one ends 100 s later; with overlap the trainer works meanwhile."""
    groups = [
        replace(one, summary=replace(one.summary, started_at_s=begin, finished_at_s=end))
        for one, begin, end in (
            (scored_group(0, lengths=(300, 300)), 1000.0, 1060.0),
            (scored_group(1, lengths=(200, 400)), 1010.0, 1100.0),
        )
    ]
    metrics = _speed(groups, {"rollout": rollout_s, "step": 120.0})
    assert metrics.get("perf/rollout_tokens_s") == (None if tokens_s is None else pytest.approx(tokens_s))
    assert metrics["perf/throughput_tokens_s"] == 10.0
    assert (metrics["perf/response_tokens"], metrics["timing_s/rollout"]) == (1200.0, rollout_s)
