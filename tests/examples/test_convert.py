"""Ground truths of the rows that `examples.recipes.convert` writes are those that a run reads."""

import json
from pathlib import Path

import pytest

from examples.recipes.convert import convert

MESSAGES = [{"role": "user", "content": "Find x."}]


def converted(tmp_path: Path, row: dict[str, object]) -> object:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row) + "\n")
    ((row,), _) = convert(str(source))
    return row["ground_truth"]


@pytest.mark.parametrize(
    ("truth", "text"),
    [(["2", "5"], '["2", "5"]'), ({"target": ["34"]}, '{"target": ["34"]}'), (True, "true"), (34, "34")],
)
def test_a_ground_truth_that_is_no_text_becomes_json(tmp_path: Path, truth: object, text: str) -> None:
    assert converted(tmp_path, {"prompt": MESSAGES, "reward_model": {"ground_truth": truth}}) == text
    assert converted(tmp_path, {"Problem": "Find x.", "Answer": truth}) == text


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": MESSAGES, "reward_model": {"ground_truth": ""}}, "line 1: the ground truth '' is empty"),
        ({"problem": "Find x.", "answer": " "}, "line 1: the ground truth ' ' is empty"),
        ({"problem": "Find x."}, "line 1: no ground truth; give `answer`"),
    ],
)
def test_a_row_without_ground_truth_is_refused(tmp_path: Path, row: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        converted(tmp_path, row)


def test_a_prompt_with_two_ground_truths_is_two_rows_and_repetitions_are_one(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": MESSAGES, "answer": answer} for answer in ("1", "2", "1")]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept, count = convert(str(source))
    assert [row["ground_truth"] for row in kept] == ["1", "2"] and count == 3
