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


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        ('"prompt": "q \\ud83d", "answer": "1"', "`prompt`"),
        ('"prompt": [{"role": "user", "content": "q \\udc00"}], "answer": "1"', "`prompt`"),
        ('"prompt": "q", "answer": "caf\\ud83d"', "the ground truth"),
        ('"prompt": "q", "reward_model": {"ground_truth": ["a\\ud83d"]}', "the ground truth"),
        ('"prompt": "q", "answer": "1", "data_source": "\\ud83d"', "`data_source`"),
    ],
)
def test_half_of_a_character_is_refused_by_its_row(tmp_path: Path, columns: str, column: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00", "answer": "\\ud83d\\ude00"}\n' + f"{{{columns}}}\n")
    half = r"rows\.jsonl, line 2: COLUMN holds \\ud(83d|c00), half of a character .*; write the row anew from"
    with pytest.raises(ValueError, match=half.replace("COLUMN", column)):
        read_rows(str(path))
    (whole,) = read_rows(str(path), limit=1)
    assert (whole.prompt, whole.ground_truth) == ("\N{GRINNING FACE}", "\N{GRINNING FACE}")


def test_a_reward_function_gets_half_a_character_as_it_stands_in_the_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "answer": "1", "extra_info": {"\\ud83d": "\\u00e9"}}\n')
    (row,) = read_rows(str(tmp_path / "rows.jsonl"))
    assert json.loads(row.extra_info_json) == {"\ud83d": "\u00e9"} and row.extra_info_json.encode()


def test_columns_that_are_not_read_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "answer": "1", "id": "\\ud83d"}\n')
    assert len(read_rows(str(tmp_path / "rows.jsonl"))) == 1
