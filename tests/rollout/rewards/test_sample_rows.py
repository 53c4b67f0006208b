"""Rows of samples and traces of a step: each response once, under the prompt and reward that it had."""

import json
from pathlib import Path

import numpy as np

from history.store.traces import read_traces
from rollout.data.tokenizer import Tokenizer
from rollout.rewards.sample_rows import group_traces, replace_traces, sample_rows, write_rows
from rollout.types import GroupColumns
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.scored_groups import scored_group


def test_rows_say_what_the_columns_hold_and_a_repeated_step_replaces_its_file(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path / "model")
    tokenizer = Tokenizer(str(tmp_path / "model"))
    target = tmp_path / "step-0.jsonl"
    for number in (0, 1):
        group = scored_group(number)
        columns = group.columns
        assert isinstance(columns, GroupColumns)
        write_rows(target, sample_rows(group, columns, tokenizer))
    rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt_id"] for row in rows] == ["t/1"] * 4
    assert [row["sample"] for row in rows] == [0, 1, 2, 3]
    assert [row["response"] for row in rows] == [tokenizer.decode(columns.response(s)) for s in range(4)]
    assert [row["reward"] for row in rows] == list(group.rewards)
    assert [row["versions"] for row in rows] == [[[0, length]] for length in group.summary.lengths]


def test_traces_come_back_as_the_columns_had_them(tmp_path: Path) -> None:
    group = scored_group(3)
    columns = group.columns
    assert isinstance(columns, GroupColumns)
    for _ in range(2):
        replace_traces(tmp_path / "step-0.jsonl", group_traces(group, columns))
    traces = list(read_traces(tmp_path / "step-0.jsonl"))
    assert [trace.sample for trace in traces] == [0, 1, 2, 3]
    for trace in traces:
        np.testing.assert_array_equal(trace.prompt_ids, columns.prompt_ids)
        np.testing.assert_array_equal(trace.response_ids, columns.response(trace.sample))
        assert trace.reward == group.rewards[trace.sample]
