"""Files of forwards: older ones go whole, none is missing since, and the report shows the steps that are kept."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from launcher.report.metric_table import MetricTable
from launcher.report.run_timeline import read_timeline
from launcher.report.write import write_report
from launcher.run_dir import forward_traces
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.forward_traces import append_forwards, read_forwards, remove_forwards, sound_forwards
from megatron_rl.algorithm.guard import GuardState
from rollout.tracing.forwards import FORWARD, Forwards
from tests.launcher.run_dir.test_saves import Planner, Trainer, saves_of

ORIGIN_S, STEP_S = 1.7e9, 10.0
NUM_FORWARDS, NUM_ENGINES = 4, 2
"""Forwards of an engine in a step."""


def forwards_from(start_s: float) -> Forwards:
    forwards = np.zeros(NUM_FORWARDS, dtype=FORWARD)
    forwards["started_at_s"] = start_s + np.arange(NUM_FORWARDS)
    forwards["seconds"] = 0.9
    return forwards


def write_step(directory: RunDirectory, step: int) -> None:
    begin_s = ORIGIN_S + STEP_S * step
    for engine in range(NUM_ENGINES):
        append_forwards(directory.path / "traces", engine, forwards_from(begin_s + 0.5))
    directory.append_metrics(step, {"timing_s/step": STEP_S}, ended_s=begin_s + STEP_S)


def steps_of(forwards: Forwards) -> list[int]:
    """The steps of which there are forwards, in order; all forwards of each."""
    steps = ((forwards["started_at_s"] - ORIGIN_S) // STEP_S).astype(int).tolist()
    assert all(steps.count(step) == NUM_FORWARDS for step in steps)
    return list(dict.fromkeys(steps))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory(tmp_path / "run") as found:
        yield found


def run_with_saves(directory: RunDirectory, *, keep_last_samples: int) -> None:
    """Six steps with a checkpoint after each."""
    saves = saves_of(directory, [], background=False, keep_last_samples=keep_last_samples)
    for step in range(6):
        write_step(directory, step)
        saves.begin(step + 1, Trainer([]), Planner(), GuardState())


def test_forwards_of_older_steps_go_with_a_checkpoint_and_the_report_shows_the_steps_that_are_kept(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step before them stays: its file shows that nothing is missing since."""
    monkeypatch.setattr(forward_traces, "PART_BYTES", 1)
    run_with_saves(directory, keep_last_samples=2)
    found, is_cut = read_forwards(directory.path / "traces", max_bytes=1 << 20)
    assert [steps_of(forwards) for forwards in found] == [[3, 4, 5]] * NUM_ENGINES and is_cut
    timeline = read_timeline(directory.path, MetricTable.read(directory.path))
    assert [step.number for step in timeline.steps] == [4, 5]
    assert "Older forwards were removed or are too many to show; only the newest 2 steps are shown." in timeline.notes


@pytest.mark.parametrize(("keep_last_samples", "part_bytes"), [(0, 1), (9, 1), (2, 1 << 20)])
def test_all_forwards_stay_if_their_steps_are_kept_or_the_file_is_small(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, keep_last_samples: int, part_bytes: int
) -> None:
    monkeypatch.setattr(forward_traces, "PART_BYTES", part_bytes)
    run_with_saves(directory, keep_last_samples=keep_last_samples)
    found, is_cut = read_forwards(directory.path / "traces", max_bytes=1 << 20)
    assert [steps_of(forwards) for forwards in found] == [list(range(6))] * NUM_ENGINES and not is_cut
    timeline = read_timeline(directory.path, MetricTable.read(directory.path))
    assert [step.number for step in timeline.steps] == list(range(6))


def test_an_engine_without_forwards_since_keeps_its_newest_closed_file(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files show that older ones are gone."""
    monkeypatch.setattr(forward_traces, "PART_BYTES", 1)
    traces = directory.path / "traces"
    for step in range(4):
        write_step(directory, step)
        directory.remove_samples(step + 1, 1)
    for step in range(4, 8):
        append_forwards(traces, 0, forwards_from(ORIGIN_S + STEP_S * step + 0.5))
        directory.append_metrics(step, {"timing_s/step": STEP_S}, ended_s=ORIGIN_S + STEP_S * (step + 1))
        directory.remove_samples(step + 1, 1)
    (first, second), is_cut = read_forwards(traces, max_bytes=1 << 20)
    assert (steps_of(first), steps_of(second), is_cut) == ([6, 7], [3], True)
    assert sorted(path.name for path in traces.iterdir()) == [
        "engine-0.7.forwards",
        "engine-0.8.forwards",
        "engine-1.4.forwards",
    ]


def test_the_newest_forwards_of_several_files_are_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_traces, "PART_BYTES", 1)
    for step in range(11):
        append_forwards(tmp_path, 0, forwards_from(STEP_S * step))
        remove_forwards(tmp_path, -math.inf)
    append_forwards(tmp_path, 0, forwards_from(STEP_S * 11))
    assert len(list(tmp_path.iterdir())) == 12
    (whole,), is_cut = read_forwards(tmp_path, max_bytes=1 << 20)
    assert len(whole) == 12 * NUM_FORWARDS and (np.diff(whole["started_at_s"]) > 0).all() and not is_cut
    (newest,), is_cut = read_forwards(tmp_path, max_bytes=6 * FORWARD.itemsize + 5)
    assert newest.tobytes() == whole[-6:].tobytes() and is_cut


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("started_at_s", value) for value in (0.0, math.nan, math.inf, 1e300, -1.0, time.time() + 1e6)),
        *(("seconds", value) for value in (math.nan, math.inf, 1e30, -1.0)),
    ],
)
@pytest.mark.parametrize("at", [0, 2, NUM_FORWARDS - 1])
def test_records_with_damaged_times_are_left_out_and_the_timeline_keeps_its_times(
    directory: RunDirectory, field: str, value: float, at: int
) -> None:
    write_step(directory, 0)
    path = directory.path / "traces" / "engine-1.forwards"
    damaged = np.frombuffer(path.read_bytes(), dtype=FORWARD).copy()
    damaged[field][at] = value
    path.write_bytes(damaged.tobytes())
    write_report(directory.path)
    trace = json.loads((directory.path / "timeline.json").read_text())["otherData"]
    assert ORIGIN_S <= trace["started_at_s"] <= ORIGIN_S + 2
    assert "1 forwards of engines have damaged times and are not shown." in trace["notes"]


@pytest.mark.parametrize(("at", "by_s"), [(3, -100.0), (3, 100.0), (11, -100.0), (0, 100.0)])
def test_of_records_out_of_order_the_fewer_are_left_out(at: int, by_s: float) -> None:
    whole = np.concatenate([forwards_from(ORIGIN_S + STEP_S * step) for step in range(3)])
    assert sound_forwards(whole).tobytes() == whole.tobytes() and len(sound_forwards(whole[:0])) == 0
    damaged = whole.copy()
    damaged["started_at_s"][at] += by_s
    assert sound_forwards(damaged).tobytes() == np.delete(whole, at).tobytes()
    adjusted = whole.copy()
    adjusted["started_at_s"][6:] -= 0.9
    assert len(sound_forwards(adjusted)) == len(whole), "a clock that was corrected"


@pytest.mark.parametrize("size", [0, 10])
def test_a_closed_file_without_a_whole_record_ends_no_save(directory: RunDirectory, size: int) -> None:
    for step in range(3):
        write_step(directory, step)
    traces = directory.path / "traces"
    for number in (1, 2):
        (traces / f"engine-0.{number}.forwards").write_bytes(bytes(size))
    directory.remove_samples(3, 1)
    assert not (traces / "engine-0.1.forwards").exists() and (traces / "engine-0.2.forwards").exists()
