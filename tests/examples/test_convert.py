"""Ground truths of the rows that `examples.recipes.convert` writes are those that a run reads."""

import datetime
import decimal
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from examples.recipes.convert import convert, main
from rollout.data.rows import read_rows

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


def test_columns_of_a_parquet_file_that_json_lacks_become_the_text_that_a_run_reads(tmp_path: Path) -> None:
    source, target = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    extra_info = {"when": datetime.datetime(2024, 2, 1), "weight": decimal.Decimal("1.50")}
    row = {"prompt": MESSAGES, "answer": "34", "extra_info": extra_info}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), source)
    assert main([str(source), str(target)]) == 0
    (written,), (read,) = read_rows(str(target)), read_rows(str(source))
    assert written.extra_info_json == read.extra_info_json == '{"when": "2024-02-01 00:00:00", "weight": "1.50"}'


def test_a_row_with_half_of_a_character_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"problem": "cut \\ud83d", "answer": "1"}\n')
    assert main([str(source), str(target)]) == 2 and not target.exists()
    assert "line 1: the row holds \\ud83d, half of a character" in capsys.readouterr().err
