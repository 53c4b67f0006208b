"""The score that an evaluation takes of a response."""

from dataclasses import replace

import pytest

from rollout.evaluation import accuracy, evaluation_rows
from rollout.types import Score, ScoreStatus
from tests.support.scored_groups import scored_group


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (Score(reward=-1.0, status=ScoreStatus.OK), -1.0),
        (Score(reward=-1.0, status=ScoreStatus.OK, details=(("acc", 1.0),)), 1.0),
        (Score(reward=-1.0, status=ScoreStatus.ERROR), 0.0),
        (Score(reward=1.0, status=ScoreStatus.TIMEOUT), 0.0),
        (Score(reward=0.0, status=ScoreStatus.TIMEOUT, is_left_out=True), 0.0),
    ],
)
def test_a_response_has_its_accuracy_else_its_reward_and_0_if_scoring_failed(score: Score, expected: float) -> None:
    assert accuracy(score) == expected


def test_a_failed_call_lowers_an_average_of_accuracies_to_no_less_than_a_wrong_answer() -> None:
    right = Score(reward=1.0, status=ScoreStatus.OK, details=(("acc", 1.0),))
    failed = Score(reward=-1.0, status=ScoreStatus.ERROR, error="no service")
    (row,) = evaluation_rows("held", [replace(scored_group(1), scores=(right, failed) * 2)], format="bf16", step=0)
    assert (row.average, row.passed) == (0.5, 1.0)
