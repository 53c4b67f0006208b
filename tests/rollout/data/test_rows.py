"""Ground truths of rows; the other columns are tested with the loader in `test_prompts.py`."""

import json
from pathlib import Path

import pytest

from rollout.data.rows import ground_truth_of, read_rows


@pytest.mark.parametrize(
    "columns",
    [{"answer": ""}, {"answer": " \n"}, {"ground_truth": ""}, {"reward_model": {"ground_truth": ""}, "answer": "5"}],
)
def test_an_empty_ground_truth_is_refused_by_its_row(tmp_path: Path, columns: dict[str, object]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x", **row}) + "\n" for row in ({"answer": "1"}, columns)))
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: the ground truth '.*' is empty; write the answer"):
        read_rows(str(path))


@pytest.mark.parametrize(
    ("answer", "text"),
    [(0, "0"), (False, "false"), ([], "[]"), ({}, "{}"), (["2", "5"], '["2", "5"]'), ("none", "none"), (" 5 ", " 5 ")],
)
def test_values_for_reward_functions_of_ones_own_are_kept(answer: object, text: str) -> None:
    assert ground_truth_of({"answer": answer}, where="row 1") == text
