"""Traces of another run: the last visit of this run's prompts, older than new visits, with the same tokenizer."""

import numpy as np
import pytest

from history.store.traces import Trace, write_traces
from history.store.warm_start import read_warm_start, warm_start_problems
from history.types import prompt_key
from tests.support.responses import token_ids

PROMPTS = {f"math/{row}": np.array([row, 7, row], dtype=np.int32) for row in range(6)}


def trace(row: int, step: int, sample: int, *, prompt_ids=None) -> Trace:
    return Trace(
        step=step,
        prompt_id=f"math/{row}",
        sample=sample,
        prompt_ids=PROMPTS[f"math/{row % 6}"] if prompt_ids is None else prompt_ids,
        response_ids=token_ids(row, step, sample, 9),
        reward=0.5,
    )


def test_the_last_visit_of_each_prompt_is_loaded_with_steps_below_zero(tmp_path):
    for step in (0, 1, 2, 10):
        rows = {0: (0, 1), 1: (2, 3), 2: (0, 2), 10: (1, 8)}[step]
        write_traces(tmp_path / f"step-{step}.jsonl", [trace(row, step, sample) for row in rows for sample in range(3)])
    found = [entry for batch in read_warm_start(tmp_path, PROMPTS) for entry in batch.entries()]
    steps = {key: {response.step for k, response in found if k == key} for key, _ in found}
    assert steps == {
        prompt_key("math/0"): {-9},
        prompt_key("math/1"): {-1},
        prompt_key("math/2"): {-9},
        prompt_key("math/3"): {-10},
    }
    assert len(found) == 12
    _, response = next(one for one in found if one[0] == prompt_key("math/3"))
    np.testing.assert_array_equal(response.token_ids, token_ids(3, 1, response.sample, 9))
    assert response.reward == 0.5


def test_many_tokens_are_loaded_in_several_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("history.store.warm_start._TOKENS_PER_BATCH", 40)
    write_traces(tmp_path / "t.jsonl", [trace(row, 0, sample) for row in range(6) for sample in range(4)])
    batches = read_warm_start(tmp_path / "t.jsonl", PROMPTS)
    assert len(batches) > 4
    assert sum(map(len, batches)) == 24
    assert {key for batch in batches for key, _ in batch.entries()} == {prompt_key(name) for name in PROMPTS}


def test_traces_of_another_tokenizer_are_refused_and_an_edited_prompt_is_left_out(tmp_path):
    other = np.array([99], dtype=np.int32)
    write_traces(tmp_path / "other.jsonl", [trace(row, 0, 0, prompt_ids=other) for row in range(6)])
    with pytest.raises(ValueError, match=r"another tokenizer or chat template: 6 prompts .* the first is math/0"):
        read_warm_start(tmp_path / "other.jsonl", PROMPTS)
    write_traces(tmp_path / "one.jsonl", [trace(row, 0, 0, prompt_ids=other if row == 2 else None) for row in range(6)])
    (batch,) = read_warm_start(tmp_path / "one.jsonl", PROMPTS)
    assert {key for key, _ in batch.entries()} == {prompt_key(name) for name in PROMPTS} - {prompt_key("math/2")}


def test_traces_of_other_prompts_and_invalid_lines_are_refused(tmp_path):
    write_traces(tmp_path / "t.jsonl", [trace(8, 0, 0)])
    with pytest.raises(ValueError, match="none of its prompts is one of this run's 6"):
        read_warm_start(tmp_path / "t.jsonl", PROMPTS)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: not a trace"):
        read_warm_start(tmp_path / "bad.jsonl", PROMPTS)


def test_a_path_without_history_is_refused(tmp_path):
    assert "neither a folder with a manifest.json" in warm_start_problems(tmp_path)[0]
    assert warm_start_problems(tmp_path / "missing.jsonl")
    (tmp_path / "t.jsonl").touch()
    assert warm_start_problems(tmp_path) == warm_start_problems(tmp_path / "t.jsonl") == []
