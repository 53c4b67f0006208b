"""Columns of the table against a search through the rows."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.metric_table import MetricTable

NAMES = ("a", "b", "c")
VALUES = st.floats(allow_nan=False) | st.integers(min_value=-(2**50), max_value=2**50) | st.none() | st.text(max_size=2)
ROWS = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES), max_size=30)


@given(rows=ROWS)
def test_columns_hold_what_the_rows_hold_in_their_order(rows: list[dict[str, object]]) -> None:
    table = MetricTable.of(rows)
    assert table.num_rows == len(rows)
    for name in NAMES:
        wanted = [(n, row[name]) for n, row in enumerate(rows) if isinstance(row.get(name), int | float)]
        numbers, values = table.column(name)
        assert list(zip(numbers.tolist(), values.tolist(), strict=True)) == wanted
        assert table.values(name).tolist() == [value for _, value in wanted]
        filled = dict(wanted)
        assert table.filled(name, 7.0).tolist() == [filled.get(number, 7.0) for number in range(len(rows))]
    numbers_of_last = {name: value for name, value in (rows or [{}])[-1].items() if isinstance(value, int | float)}
    assert table.last_row() == numbers_of_last


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    rows = [{"step": 0, "a": 1.5}, {"step": 1, "a": math.nan}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 2, "a"', encoding="utf-8")
    table = MetricTable.read(tmp_path)
    assert table.num_rows == 2 and table.filled("step").tolist() == [0, 1]
    assert math.isnan(table.values("a")[1]), "what was recorded is not hidden"
    assert MetricTable.read(tmp_path / "missing").num_rows == 0


@pytest.mark.parametrize("step", ["NaN", "Infinity", "1e30", "1.5", "true", '"1"', "null", "1" + "0" * 400])
def test_a_row_without_a_step_is_a_damaged_line(tmp_path: Path, step: str) -> None:
    lines = ['{"step": 0, "a": 1.5}', f'{{"step": {step}, "a": 2.5}}', '{"a": 3.5}']
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    table = MetricTable.read(tmp_path)
    assert (table.num_rows, table.num_damaged, table.values("a").tolist()) == (1, 2, [1.5])
