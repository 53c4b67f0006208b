"""Traces of another run: the last visit of this run's prompts, older than new visits, with the same tokenizer."""

import tracemalloc

import numpy as np
import pytest

from history.store.prompt_store import RESPONSE_BYTES
from history.store.traces import Trace, write_traces
from history.store.warm_start import read_warm_start, warm_start_problems
from history.types import prompt_key
from tests.support.responses import token_ids

PROMPTS = {f"math/{row}": np.array([row, 7, row], dtype=np.int32) for row in range(6)}


def trace(row: int, step: int, sample: int, *, prompt_ids=None, length: int = 9) -> Trace:
    return Trace(
        step=step,
        prompt_id=f"math/{row}",
        sample=sample,
        prompt_ids=PROMPTS[f"math/{row % 6}"] if prompt_ids is None else prompt_ids,
        response_ids=token_ids(row, step, sample, length),
        reward=0.5,
    )


def read(path, prompts=PROMPTS, *, budget_bytes=1 << 30, said=None):
    say = [].append if said is None else said.append
    return list(read_warm_start(path, prompts, budget_bytes=budget_bytes, say=say))


def test_the_last_visit_of_each_prompt_is_loaded_with_steps_below_zero(tmp_path):
    for step in (0, 1, 2, 10):
        rows = {0: (0, 1), 1: (2, 3), 2: (0, 2), 10: (1, 8)}[step]
        write_traces(tmp_path / f"step-{step}.jsonl", [trace(row, step, sample) for row in rows for sample in range(3)])
    found = [entry for batch in read(tmp_path) for entry in batch.entries()]
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
    batches = read(tmp_path / "t.jsonl")
    assert len(batches) > 4
    assert sum(map(len, batches)) == 24
    assert {key for batch in batches for key, _ in batch.entries()} == {prompt_key(name) for name in PROMPTS}


def test_one_file_of_many_steps_gives_the_last_visit_of_each_prompt(tmp_path):
    visits = [(0, 0), (1, 0), (0, 1), (2, 1), (1, 3)]
    write_traces(tmp_path / "t.jsonl", [trace(row, step, sample) for row, step in visits for sample in range(2)])
    (batch,) = read(tmp_path / "t.jsonl")
    steps = {(key, one.step) for key, one in batch.entries()}
    assert steps == {(prompt_key("math/0"), -3), (prompt_key("math/2"), -3), (prompt_key("math/1"), -1)}
    assert len(batch) == 6


def test_both_groups_of_a_prompt_that_was_drawn_twice_in_a_step_are_loaded(tmp_path):
    write_traces(tmp_path / "step-4.jsonl", [trace(row, 4, sample) for row in (0, 1, 0) for sample in range(3)])
    (batch,) = read(tmp_path)
    twice = [one.sample for key, one in batch.entries() if key == prompt_key("math/0")]
    assert twice == [0, 1, 2, 3, 4, 5]
    assert len(batch) == 9


def test_the_newest_prompts_fill_the_budget_and_the_others_are_never_in_memory(tmp_path, monkeypatch):
    """20 steps of 10 prompts, three of which the step before had, too; there is room for 20 visits."""
    monkeypatch.setattr("history.store.warm_start._TOKENS_PER_BATCH", 1 << 15)
    length, newest = 4000, {}
    prompts = {f"math/{row}": PROMPTS[f"math/{row % 6}"] for row in range(200)}
    for step in range(20):
        rows = [(7 * step + number) % 200 for number in range(10)]
        newest |= {prompt_key(f"math/{row}"): step for row in rows}
        visits = [trace(row, step, sample, length=length) for row in rows for sample in range(4)]
        write_traces(tmp_path / f"step-{step}.jsonl", visits)
    budget_bytes = 20 * 4 * (4 * length + RESPONSE_BYTES)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 10 * budget_bytes
    said, steps, num_bytes = [], {}, 0
    tracemalloc.start()
    for batch in read_warm_start(tmp_path, prompts, budget_bytes=budget_bytes, say=said.append):
        steps |= {key: one.step + 20 for key, one in batch.entries()}
        num_bytes += 4 * len(batch.token_ids) + RESPONSE_BYTES * len(batch)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * budget_bytes
    assert len(steps) == 20 and num_bytes == budget_bytes
    assert steps.items() <= newest.items()
    assert min(steps.values()) >= max(step for key, step in newest.items() if key not in steps)
    assert said == [
        f"`history.budget_bytes` = {budget_bytes} holds the newest 20 prompts of `history.warm_start` = {tmp_path}; "
        "older ones are left out"
    ]


def test_traces_of_another_tokenizer_are_refused_before_all_files_are_read(tmp_path):
    other = np.array([99], dtype=np.int32)
    prompts = {f"math/{row}": PROMPTS["math/0"] for row in range(100)}
    write_traces(tmp_path / "step-9.jsonl", [trace(row, 9, 0, prompt_ids=other) for row in range(64)])
    (tmp_path / "step-8.jsonl").write_text("never read\n")
    with pytest.raises(ValueError, match="another tokenizer or chat template: 64 prompts"):
        read(tmp_path, prompts)


def test_traces_of_another_tokenizer_are_refused_and_an_edited_prompt_is_left_out(tmp_path):
    other = np.array([99], dtype=np.int32)
    write_traces(tmp_path / "other.jsonl", [trace(row, 0, 0, prompt_ids=other) for row in range(6)])
    with pytest.raises(ValueError, match=r"another tokenizer or chat template: 6 prompts .* the first is math/0"):
        read(tmp_path / "other.jsonl")
    write_traces(tmp_path / "one.jsonl", [trace(row, 0, 0, prompt_ids=other if row == 2 else None) for row in range(6)])
    (batch,) = read(tmp_path / "one.jsonl")
    assert {key for key, _ in batch.entries()} == {prompt_key(name) for name in PROMPTS} - {prompt_key("math/2")}


def test_traces_of_other_prompts_and_invalid_lines_are_refused(tmp_path):
    write_traces(tmp_path / "t.jsonl", [trace(8, 0, 0)])
    with pytest.raises(ValueError, match="none of its prompts is one of this run's 6"):
        read(tmp_path / "t.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: not a trace"):
        read(tmp_path / "bad.jsonl")


def test_a_path_without_history_is_refused(tmp_path):
    assert "neither a folder with a manifest.json" in warm_start_problems(tmp_path)[0]
    assert warm_start_problems(tmp_path / "missing.jsonl")
    (tmp_path / "t.jsonl").touch()
    assert warm_start_problems(tmp_path) == warm_start_problems(tmp_path / "t.jsonl") == []
