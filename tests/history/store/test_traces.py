"""Recorded responses are read back as written; an incomplete file is read up to its last complete line."""

from pathlib import Path

import numpy as np
import pytest

from history.store.traces import Trace, read_traces, write_traces


def trace(step: int, sample: int) -> Trace:
    ids = np.arange(step, step + 5, dtype=np.int32)
    return Trace(step=step, prompt_id="train/3", sample=sample, prompt_ids=ids, response_ids=ids * 2, reward=0.5)


def test_traces_are_read_in_the_order_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "step-0.jsonl"
    write_traces(path, [trace(0, 0), trace(0, 1)])
    write_traces(path, [trace(1, 0)])
    found = list(read_traces(path))
    assert [(t.step, t.sample) for t in found] == [(0, 0), (0, 1), (1, 0)]
    np.testing.assert_array_equal(found[2].response_ids, [2, 4, 6, 8, 10])
    assert found[2].response_ids.dtype == np.int32


def test_chosen_lines_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "step-0.jsonl"
    write_traces(path, [trace(0, sample) for sample in range(4)])
    path.write_text("another line\n" + path.read_text())
    assert [one.sample for one in read_traces(path, only={2, 5, 9})] == [0, 3]


def test_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "step-0.jsonl"
    write_traces(path, [trace(0, 0), trace(0, 1)])
    path.write_bytes(path.read_bytes()[:-7])
    assert len(list(read_traces(path))) == 1


def test_a_bad_line_in_the_middle_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "step-0.jsonl"
    write_traces(path, [trace(0, 0)])
    path.write_text('{"step": 1}\n' + path.read_text())
    with pytest.raises(ValueError, match=r"step-0\.jsonl:1: not a trace"):
        list(read_traces(path))
