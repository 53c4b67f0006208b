"""The start of a run from a checkpoint whose small files are damaged."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from history.lengths.book import LengthBook
from launcher.commands.resume_point import resume_point
from launcher.errors import RunDirectoryError
from launcher.run_dir.directory import RunDirectory
from megatron_rl.algorithm.guard import GuardState
from rollout.data.order import OrderState

ORDER = OrderState(fingerprint="f", cursor=4, consumed_ahead=(6,)).to_json()
STATE = {"finished_steps": 2, "prompt_order": ORDER, "guard": GuardState().to_json()}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run of three steps with a checkpoint after the second."""
    with RunDirectory(tmp_path) as run:
        folder = run.begin_checkpoint(2)
        (folder / "state.json").write_text(json.dumps(STATE))
        book = LengthBook()
        book.observe(7, 1, [100, 300])
        book.save(folder / "lengths.npz")
        run.finish_checkpoint(2, 2)
        for step in range(3):
            run.append_metrics(step, {}, ended_s=float(step))
        yield run


def test_lengths_are_read_before_a_process_starts(directory: RunDirectory) -> None:
    found = resume_point(directory)
    assert (found.lengths.expected(7), found.notes) == (200, ())
    assert resume_point(directory).lengths is not found.lengths


def test_damaged_lengths_begin_anew_with_a_line(directory: RunDirectory) -> None:
    path = directory.path / "checkpoints" / "2" / "lengths.npz"
    whole = path.read_bytes()
    flips = [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(0, len(whole), 3)]
    num_refused = 0
    for content in [*(whole[:size] for size in range(0, len(whole), 13)), *flips]:
        path.write_bytes(content)
        found = resume_point(directory)
        if found.notes:
            num_refused += 1
            assert found.notes[0].startswith("forecasts of response lengths begin anew: ") and len(found.lengths) == 0
        else:
            assert found.lengths.expected(7) == 200
    assert num_refused > len(flips) // 2
    np.savez(path, keys=np.zeros(3), steps=np.zeros(1, int), counts=np.ones(1, int), lengths=np.ones(1, int))
    assert len(resume_point(directory).notes) == 1


@pytest.mark.parametrize(
    "state",
    [
        *(None, [], 3, "x", {}, STATE | {"prompt_order": None}, STATE | {"prompt_order": []}),
        *(STATE | {"finished_steps": 1}, STATE | {"finished_steps": None}, STATE | {"guard": 3}),
        *(STATE | {"prompt_order": ORDER | change} for change in ({"cursor": -1}, {"consumed_ahead": [5, -1]})),
        *(STATE | {"prompt_order": ORDER | change} for change in ({"cursor": "x"}, {"consumed_ahead": [None]})),
        STATE | {"prompt_order": ORDER | {"consumed_ahead": [float("inf")]}},
    ],
)
def test_a_state_that_is_none_is_refused_before_records_are_moved(directory: RunDirectory, state: object) -> None:
    (directory.path / "checkpoints" / "2" / "state.json").write_text(json.dumps(state))
    with pytest.raises(RunDirectoryError, match=r"2 has no readable state .*; no checkpoint before it is left"):
        resume_point(directory)
    assert len(directory.metrics()) == 3


def test_damaged_rows_are_moved_aside_with_a_line(directory: RunDirectory) -> None:
    metrics = directory.path / "metrics.jsonl"
    metrics.write_bytes(bytes(9) + b"\n" + metrics.read_bytes() + b"null\n")
    (note,) = resume_point(directory).notes
    assert note == "2 damaged line(s) of metrics.jsonl moved to metrics.abandoned.jsonl (line 1, 5)"
    assert [row["step"] for row in directory.metrics()] == [0, 1]
