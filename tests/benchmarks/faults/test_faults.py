"""The table of faults, the verdict over a disturbed run, and a random cell of the table in earnest."""

import fcntl
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.faults import outcome as verdict
from benchmarks.faults.cells import PHASES, ROLES, Cell, cells
from benchmarks.faults.example import NUM_STEPS, write_config
from benchmarks.faults.inject import Ended, run_disturbed
from benchmarks.faults.outcome import left_behind
from history.index.segments_dir import claim
from tests.support.runs.background import OF_VLLM

CELL = Cell(role="trainer rank", fault="kill", phase="train", run="exact")
SAMPLED = [cell for cell in cells() if cell.fault == "kill" and cell.run == "exact" and cell.role != "controller"]
"""Cells that need no deadline."""


def run_dir(folder: Path, *, responses: int = 16, weights: bytes = b"w", loss: float = 1.0) -> Path:
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "model.safetensors").write_bytes(weights)
    steps = [
        {"step": step, "batch/responses": responses, "actor/loss": loss, "time_s": 100.0 + 6 * step}
        for step in range(NUM_STEPS)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def test_the_table_has_every_process_in_every_phase_once() -> None:
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names))
    assert {cell.role for cell in cells()} == set(ROLES)
    of_trainer = {(cell.fault, cell.phase) for cell in cells() if cell.role == "trainer rank" and cell.run == "exact"}
    assert of_trainer == {(fault, phase) for fault in ("kill", "freeze") for phase in PHASES}


@pytest.mark.parametrize(
    ("codes", "changes", "is_as_promised"),
    [
        ((0,), {}, True),
        ((-9, 0), {}, True),
        ((9, 9, 9), {}, False),
        ((None,), {}, False),
        ((0,), {"responses": 15}, False),
        ((0,), {"loss": 1.001}, False),
        ((0,), {"weights": b"v"}, False),
    ],
)
def test_a_run_is_as_promised_if_it_ended_and_equals_the_undisturbed_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codes: tuple[int | None, ...],
    changes: dict[str, object],
    is_as_promised: bool,
) -> None:
    monkeypatch.setattr(verdict, "left_behind", list)
    calm, found = run_dir(tmp_path / "calm"), run_dir(tmp_path / "found", **changes)
    ended = Ended(codes=codes, hit_at_s=101.0, ended_at_s=110.0)
    row = verdict.outcome(CELL, found, calm, ended)
    assert row["as_promised"] is is_as_promised
    assert row["until_next_step_s"] == 5.0  # the second step ended 106 s after the begin
    monkeypatch.setattr(verdict, "left_behind", lambda: [Path("mrl-x")])
    assert not verdict.outcome(CELL, found, calm, ended)["as_promised"]


def test_a_cell_whose_process_was_not_there_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "left_behind", list)
    calm, found = run_dir(tmp_path / "calm"), run_dir(tmp_path / "found")
    assert not verdict.outcome(CELL, found, calm, Ended(codes=(0,), hit_at_s=None, ended_at_s=9.0))["as_promised"]


def test_shared_memory_of_a_living_process_is_not_left_behind(tmp_path: Path) -> None:
    folder = tmp_path / "mrl-history-a-1"
    claimed = claim(folder)
    held, free = tmp_path / "mrl-a-1-w0-r0", tmp_path / "mrl-b-2-w0-r0"
    for path in (held, free, tmp_path / "other"):
        path.touch()
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert left_behind(tmp_path) == [free]
    assert set(left_behind(tmp_path)) == {held, free}
    os.close(claimed)
    assert set(left_behind(tmp_path)) == {held, free, folder}


@pytest.mark.slow
@pytest.mark.long
def test_a_random_fault_leaves_no_trace(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 30)
    cell = random.Random(seed).choice(SAMPLED)
    print(f"{cell.name}, drawn with seed {seed}")
    before = set(verdict.left_behind())  # of other tests
    monkeypatch.setattr(verdict, "left_behind", lambda: sorted(set(left_behind()) - before))
    for name in OF_VLLM:
        monkeypatch.delenv(name, raising=False)
    config = write_config(example, "exact")
    run_disturbed(config, tmp_path / "calm", None, seed=seed)
    ended = run_disturbed(config, tmp_path / "disturbed", cell, seed=seed)
    row = verdict.outcome(cell, tmp_path / "disturbed", tmp_path / "calm", ended)
    assert row["as_promised"], (row, (tmp_path / "disturbed.log").read_text()[-4000:])
    shutil.rmtree(tmp_path)
