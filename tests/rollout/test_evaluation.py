"""The score that an evaluation takes of a response, and which evaluations are compared."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollout.config import EvalSetConfig
from rollout.evaluation import (
    EvaluationRow,
    accuracy,
    changes,
    comparable,
    evaluation_rows,
    not_compared,
    notes,
    other_scales,
    run_settings_digest,
    settings_digest,
)
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
    groups = [replace(scored_group(1), scores=(right, failed) * 2)]
    (row,) = evaluation_rows("held", groups, format="bf16", step=0, settings="s")
    assert (row.average, row.passed, row.settings) == (0.5, 1.0, "s")


def scored(rewards: tuple[float, ...], accuracy: float | None = None) -> EvaluationRow:
    """The row of a set with one group."""
    details = () if accuracy is None else (("acc", accuracy),)
    scores = tuple(Score(reward=reward, status=ScoreStatus.OK, details=details) for reward in rewards)
    groups = [replace(scored_group(1, num_samples=len(rewards)), scores=scores)]
    (row,) = evaluation_rows("held", groups, format="bf16", step=0, settings="s")
    return row


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (scored((0.0, 1.0, 1.0)), None),
        (scored((0.25, 1.0000000000000002)), None),
        (scored((-1.0, 1.0, 1.0)), -1.0),
        (scored((-1.0, 1.0, 1.0), accuracy=1.0), None),
        (scored((0.0, 3.0, -2.5)), -2.5),
        (scored((0.0, 1.0), accuracy=85.0), 85.0),
    ],
)
def test_a_mean_of_scores_outside_0_to_1_is_no_accuracy_wherever_it_lies(
    row: EvaluationRow, expected: float | None
) -> None:
    assert row.other_scale == row.outside == expected
    said = other_scales([row, replace(row, step=3)])
    assert list(said) == ([] if expected is None else ["held"])
    if expected is not None:
        assert said["held"].startswith(f"held: the score {expected:g} is not between 0 and 1, so avg@k is a mean ")
        assert "as `acc` beside `score`" in said["held"]


def test_one_evaluation_with_scores_of_another_scale_takes_the_points_from_a_change() -> None:
    rows = [replace(scored((-1.0, 1.0)), step=0), replace(scored((1.0, 1.0)), step=9)]
    assert [row.other_scale for row in rows] == [-1.0, None]
    (change,) = changes(rows)
    assert (change.is_accuracy, change.gain) == (False, 1.0)
    assert notes(rows) == list(other_scales(rows).values())
    assert notes(rows[:1]) == [], "of a single step"


def evaluated(
    step: int, settings: str, *, num_prompts: int = 8, k: int = 1, source: str = "all", run_settings: str = "r"
) -> EvaluationRow:
    return EvaluationRow(
        **{"set_name": "held", "data_source": source, "format": "int8", "step": step, "num_prompts": num_prompts},
        **{"average": 0.5, "passed": 0.5, "truncated": 0.0, "mean_length": 5.0},
        samples_per_prompt=k,
        settings=settings,
        run_settings=run_settings,
    )


def test_the_digest_of_settings_changes_with_all_that_decides_the_answers_and_with_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "held.jsonl"
    path.write_text("one\n")
    base = EvalSetConfig(path=str(path), temperature=1.0)
    digest = settings_digest(base)
    assert len(digest) == 16
    changed = [{"limit": 1}, {"temperature": 0.5}, {"top_p": 0.9}, {"max_response_tokens": 8192}]
    assert {key for each in changed for key in each} == set(EvalSetConfig.model_fields) - {"path", "samples_per_prompt"}
    digests = [settings_digest(base.model_copy(update=each)) for each in changed]
    assert len({digest, *digests}) == 5
    assert settings_digest(base.model_copy(update={"samples_per_prompt": 4})) == digest
    moved = path.rename(tmp_path / "moved.jsonl")
    assert settings_digest(base.model_copy(update={"path": str(moved)})) == digest
    moved.write_text("one\ntwo\n")
    assert settings_digest(base.model_copy(update={"path": str(moved)})) != digest


def test_the_digest_of_a_runs_settings_changes_with_template_stop_tokens_and_reward_function() -> None:
    base = {"template_arguments": {"a": 1, "b": True}, "stop_token_ids": [7, 9], "reward_function": "mine.score"}
    changed: list[dict[str, object]] = [
        {},
        {"template_arguments": {"a": 1, "b": False}},
        {"template_arguments": {}},
        {"stop_token_ids": [7]},
        {"reward_function": "mine.other"},
    ]
    digests = [run_settings_digest(**(base | each)) for each in changed]  # type: ignore[arg-type]
    assert len(set(digests)) == 5 and {len(digest) for digest in digests} == {16}
    same = {"template_arguments": {"b": True, "a": 1}, "stop_token_ids": (9, 7, 7)}
    assert run_settings_digest(**(base | same)) == digests[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["settings", "run_settings"])
def test_rows_before_and_after_a_change_of_settings_are_two_lines(key: str) -> None:
    rows = [replace(evaluated(step, "s"), **{key: value}) for step, value in ((0, "a"), (5, "a"), (10, "b"), (15, "b"))]
    assert [[row.step for row in line] for line in comparable(rows)] == [[0, 5], [10, 15]]


def test_a_row_of_an_earlier_version_is_read_and_compared_with_its_like_only() -> None:
    later = {"settings", "run_settings", "outside"}
    earlier = {key: value for key, value in evaluated(0, "").as_row().items() if key not in later}
    row = EvaluationRow.from_row(earlier)
    assert row == evaluated(0, "", run_settings="") and EvaluationRow.from_row(row.as_row()) == row
    older = evaluated(3, "", run_settings="")
    (change,) = changes([row, older, evaluated(0, "b"), evaluated(6, "a"), evaluated(9, "")])
    assert (change.before.step, change.after.step) == (0, 3)
    assert EvaluationRow.from_row({**earlier, "average": -0.8}).other_scale == -0.8


def test_evaluations_of_other_settings_are_not_compared_and_pairs_stand_in_the_order_of_their_rows() -> None:
    rows = [evaluated(step, settings) for step, settings in ((0, "z"), (5, "z"), (10, "a"), (20, "a"), (30, "b"))]
    assert [(each.before.step, each.after.step) for each in changes(rows)] == [(0, 5), (10, 20)]
    (said,) = not_compared(rows)
    assert "after 0, 5, 10, 20, 30 steps are not all compared, because they differ in the set's file" in said


def test_rows_of_an_earlier_version_do_not_hide_that_the_last_evaluation_is_left_out() -> None:
    earlier = [evaluated(step, "s", run_settings="") for step in (0, 10)]
    assert not_compared(earlier) == []
    (said,) = notes([*earlier, evaluated(20, "s")])
    assert "not all compared, because they differ in the chat template's arguments" in said


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (evaluated(9, "b"), "the set's file, limit or sampling"),
        (evaluated(9, "b", num_prompts=16), "number of prompts (8, 16), the set's file, limit or sampling"),
        (evaluated(9, "a", k=4), "k (1, 4)"),
        (evaluated(9, ""), "the set's file, limit or sampling (which an earlier version did not record)"),
        (evaluated(9, "a", run_settings="q"), "the chat template's arguments, stop tokens or reward function"),
        (
            evaluated(9, "a", k=4, run_settings=""),
            "k (1, 4), the chat template's arguments, stop tokens or reward function (which an earlier version did not "
            "record)",
        ),
    ],
)
def test_a_set_without_two_comparable_evaluations_has_a_sentence_with_the_reason(
    second: EvaluationRow, reason: str
) -> None:
    rows = [evaluated(0, "a"), evaluated(0, "a", source="x"), second, replace(second, data_source="x")]
    said = "held, INT8 (8-bit engine): the evaluations after 0, 9 steps are not compared, because they differ in "
    assert not_compared(rows) == [said + reason]
    assert not_compared([evaluated(0, "a"), evaluated(0, "b")]) == [], "of a single step"
    assert not_compared([*rows, evaluated(12, "a")]) == []
