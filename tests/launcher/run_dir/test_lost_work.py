"""The work that a resumed run repeats, against records whose times are known."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from launcher.run_dir.lost_work import LostWork, lost_work
from launcher.run_dir.status import STATUS, Now


def write_records(run_dir: Path, *, ended_s: float) -> None:
    """Three steps of 10 s from 100 s on; the last record of the run is of `ended_s`."""
    rows = [{"step": step, "time_s": 110.0 + 10 * step, "timing_s/step": 10.0} for step in range(3)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    now = Now(phase="rollout", actor="engines", step=3, num_steps=9, since_s=131.0, written_s=ended_s)
    (run_dir / STATUS).write_text(json.dumps(asdict(now)))


def test_a_first_start_repeats_nothing(tmp_path: Path) -> None:
    assert lost_work(tmp_path, 0) is None


def test_steps_after_the_checkpoint_and_the_time_since_then_are_counted(tmp_path: Path) -> None:
    write_records(tmp_path, ended_s=137.0)
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.parent.mkdir()
    pointer.write_text("1\n")
    os.utime(pointer, (112.0, 112.0))
    lost = lost_work(tmp_path, 1)
    assert lost == LostWork(num_steps=2, seconds=25.0)
    assert lost.line() == "the last start ended 25 s after its newest checkpoint; 2 finished step(s) are repeated"


def test_time_counts_to_the_last_sign_of_life_within_a_long_phase(tmp_path: Path) -> None:
    write_records(tmp_path, ended_s=137.0)
    now = json.loads((tmp_path / STATUS).read_text())
    (tmp_path / STATUS).write_text(json.dumps(now | {"alive_s": 197.0}))
    assert lost_work(tmp_path, 0) == LostWork(num_steps=3, seconds=97.0)


def test_without_a_checkpoint_time_counts_from_the_first_step(tmp_path: Path) -> None:
    write_records(tmp_path, ended_s=137.0)
    assert lost_work(tmp_path, 0) == LostWork(num_steps=3, seconds=37.0)


def test_a_start_that_ended_before_its_first_step_loses_its_last_phase(tmp_path: Path) -> None:
    now = Now(phase="load", actor="trainer", step=0, num_steps=9, since_s=50.0, written_s=58.0)
    (tmp_path / STATUS).write_text(json.dumps(asdict(now)))
    assert lost_work(tmp_path, 0) == LostWork(num_steps=0, seconds=8.0)


@pytest.mark.parametrize("text", ["", '{"phase": "roll', "[]", '{"a": 1}', '{"phase": "x"}', "\x00"])
def test_a_status_that_holds_none_does_not_keep_a_run_from_its_next_start(tmp_path: Path, text: str) -> None:
    write_records(tmp_path, ended_s=137.0)
    (tmp_path / STATUS).write_text(text)
    assert lost_work(tmp_path, 0) is None


@pytest.mark.parametrize("field", ["since_s", "written_s", "alive_s", "step", "num_steps"])
def test_a_status_with_other_types_is_none_either(tmp_path: Path, field: str) -> None:
    now = asdict(Now(phase="load", actor="trainer", step=0, num_steps=9, since_s=50.0, written_s=58.0))
    (tmp_path / STATUS).write_text(json.dumps(now | {field: "soon"}))
    assert lost_work(tmp_path, 0) is None


def test_a_status_that_cannot_be_opened_is_none_either(tmp_path: Path) -> None:
    (tmp_path / STATUS).mkdir()
    assert lost_work(tmp_path, 0) is None
