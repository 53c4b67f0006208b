"""Sample and trace rows of a step: each response once, with its prompt and reward."""

import json
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from history.store.traces import read_traces
from rollout.data.tokenizer import Tokenizer
from rollout.rewards import text_actor
from rollout.rewards.sample_rows import SampleWriter
from rollout.types import GroupColumns, GroupId, ScoredGroup, ScoreStatus
from tests.support.byte_tokenizer import tokenizer_in, write_byte_tokenizer
from tests.support.scored_groups import scored_group


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    return tokenizer_in(directory)


def with_columns(number: int) -> tuple[ScoredGroup, GroupColumns]:
    group = scored_group(number)
    (columns,) = group.columns
    assert isinstance(columns, GroupColumns)
    return group, columns


def test_rows_equal_the_columns_and_a_repeated_step_replaces_its_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    target = tmp_path / "step-0.jsonl"
    for number in (0, 1):
        group, columns = with_columns(number)
        returned = SampleWriter(tokenizer).write(
            [(group, columns)], samples_path=target, traces_path=None, num_returned=3
        )
    rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert returned == rows[:3]
    assert [path.name for path in tmp_path.iterdir()] == ["step-0.jsonl"]
    assert [row["prompt_id"] for row in rows] == ["t/1"] * 4
    assert [row["sample"] for row in rows] == [0, 1, 2, 3]
    assert [row["response"] for row in rows] == [tokenizer.decode(columns.response(s)) for s in range(4)]
    assert [row["reward"] for row in rows] == list(group.rewards)
    assert [row["versions"] for row in rows] == [[[0, length]] for length in group.summary.lengths]


def test_traces_read_back_equal_the_columns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    samples, target = tmp_path / "samples.jsonl", tmp_path / "traces.jsonl"
    group, columns = with_columns(3)
    for _ in range(2):
        SampleWriter(tokenizer).write([(group, columns)], samples_path=samples, traces_path=target, num_returned=0)
    traces = list(read_traces(target))
    assert [trace.sample for trace in traces] == [0, 1, 2, 3]
    for trace in traces:
        np.testing.assert_array_equal(trace.prompt_ids, columns.prompt_ids)
        np.testing.assert_array_equal(trace.response_ids, columns.response(trace.sample))
        assert trace.reward == group.rewards[trace.sample]


def test_the_trace_of_a_response_that_is_left_out_has_no_reward(tmp_path: Path, tokenizer: Tokenizer) -> None:
    group, columns = with_columns(3)
    failed = replace(group.scores[1], status=ScoreStatus.ERROR, is_left_out=True)
    scores = (group.scores[0], failed, *group.scores[2:])
    writer, target = SampleWriter(tokenizer), tmp_path / "traces.jsonl"
    writer.write(
        [(replace(group, scores=scores), columns)],
        samples_path=tmp_path / "samples.jsonl",
        traces_path=target,
        num_returned=0,
    )
    assert '"reward":null' in target.read_text(encoding="utf-8").splitlines()[1]
    rewards = [trace.reward for trace in read_traces(target)]
    assert math.isnan(rewards[1])
    assert [rewards[0], *rewards[2:]] == [group.rewards[0], *group.rewards[2:]]


def test_groups_are_written_one_after_another_and_leave_the_memory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokens: list[weakref.ref[np.ndarray]] = []

    def groups() -> Iterator[tuple[ScoredGroup, GroupColumns]]:
        for number in range(5):
            assert sum(each() is not None for each in tokens) <= 1, "tokens of earlier groups are kept"
            group, _ = with_columns(number)
            own = replace(group.columns[0], response_ids=group.columns[0].response_ids.copy())
            tokens.append(weakref.ref(own.response_ids))
            group = replace(group, columns=())
            yield group, own
            del group, own

    samples, traces = tmp_path / "samples.jsonl", tmp_path / "traces.jsonl"
    rows = SampleWriter(tokenizer).write(groups(), samples_path=samples, traces_path=traces, num_returned=6)
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [("t/0", n) for n in range(4)] + [
        ("t/1", 0),
        ("t/1", 1),
    ]
    assert len(samples.read_text(encoding="utf-8").splitlines()) == 20 == len(list(read_traces(traces)))


def test_a_group_whose_tokens_were_lost_with_a_node_is_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [scored_group(number) for number in range(3)]

    def get(columns: list[GroupColumns]) -> list[GroupColumns]:
        if columns[0] is groups[1].columns[0]:
            raise ray.exceptions.ObjectLostError("id", None, "")
        return columns

    monkeypatch.setattr(text_actor.ray, "get", get)
    lost: list[GroupId] = []
    rows = SampleWriter(tokenizer).write(
        text_actor._with_columns(groups, lost), samples_path=tmp_path / "a", traces_path=None, num_returned=99
    )
    assert {row["prompt_id"] for row in rows} == {"t/0", "t/2"} and lost == [groups[1].group.group_id]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_bytes_of_half_a_character_in_a_response_are_written_as_its_replacement(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (ids,) = tokenizer.encode(["\N{GRINNING FACE}"], add_special_tokens=False)
    group, columns = with_columns(0)
    half = replace(columns, response_ids=np.resize(ids[:2], len(columns.response_ids)))
    target = tmp_path / "step-0.jsonl"
    SampleWriter(tokenizer).write([(group, half)], samples_path=target, traces_path=None, num_returned=0)
    rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert rows and all("\N{REPLACEMENT CHARACTER}" in row["response"] for row in rows)
