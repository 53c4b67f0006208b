import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from launcher.report.chrome_trace import MAX_COUNTER_POINTS, num_steps_shown, write_trace
from launcher.report.metric_table import MetricTable
from launcher.report.run_timeline import RunTimeline, read_timeline
from launcher.run_dir.atomic_files import read_rows
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.forward_traces import append_forwards, drop_torn_record, read_forwards
from rollout.tracing.forwards import FORWARD
from rollout.tracing.timeline import engine_timelines
from tests.support.runs.synthetic_run import NUM_ENGINES, decode, write_run


def read(path: Path) -> RunTimeline:
    return read_timeline(path, MetricTable.read(path))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("synthetic") / "run"
    write_run(path)
    return path


@pytest.fixture(scope="module")
def trace(run_dir: Path):
    path = write_trace(run_dir, read(run_dir))
    assert path == run_dir / "timeline.json"
    return json.loads(path.read_text(encoding="utf-8"))


def events(trace, phase: str):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_actor_of_the_trace_has_a_named_row(trace):
    names = [event["args"]["name"] for event in events(trace, "M") if event["name"] == "thread_name"]
    engines = [f"engine {number}" for number in range(NUM_ENGINES)]
    assert names == [*engines, "controller", "trainer", "publisher", "checkpoint, evaluation", "steps"]


def test_events_are_sorted_durations_are_not_negative_and_slices_of_a_row_do_not_overlap(trace):
    timed = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert timed[0]["ts"] >= 0
    slices = events(trace, "X")
    assert min(event["dur"] for event in slices) >= 0
    for row in {event["tid"] for event in slices}:
        of_row = [event for event in slices if event["tid"] == row]
        for before, after in pairwise(of_row):
            assert before["ts"] + before["dur"] <= after["ts"]


def test_an_engine_without_requests_is_shown_waiting_for_the_others(run_dir: Path, trace):
    seconds: dict[str, float] = {}
    for event in events(trace, "X"):
        if event["tid"] < NUM_ENGINES:
            seconds[event["name"]] = seconds.get(event["name"], 0.0) + event["dur"] / 1e6 / NUM_ENGINES
    rows = read_rows(run_dir / "metrics.jsonl")
    for name, share in {
        "waits: others sample": "tail_wait_share",
        "waits: trainer": "trainer_wait_share",
        "waits: publish": "publish_share",
    }.items():
        elapsed = [row["timeline/elapsed_s"] * row[f"timeline/{share}"] for row in rows]
        assert seconds[name] == pytest.approx(sum(elapsed), rel=1e-3)


def test_sampling_slices_show_the_number_of_running_requests(trace):
    arguments = [event["args"] for event in events(trace, "X") if event["name"] == "samples"]
    assert len(arguments) == NUM_ENGINES * 6
    assert all(0 < each["saturated_share"] < 0.9 and each["forwards"] > 50 for each in arguments)


def test_counters_follow_the_running_requests_and_end_at_zero(trace):
    for number in range(NUM_ENGINES):
        points = [event for event in events(trace, "C") if event["name"] == f"engine {number}: running requests"]
        counts = [event["args"]["requests"] for event in points]
        assert max(counts) == 64
        assert counts.count(0) == 6 and counts[-1] == 0


def test_overlapping_spans_get_separate_rows_and_clock_skew_does_not(tmp_path: Path):
    with RunDirectory(tmp_path) as run:
        run.record_span("engines", "rollout", 100.0, 110.0)
        run.record_span("engines", "rollout", 104.0, 114.0)
        run.record_span("engines", "rollout", 105.0, 115.0)
        run.record_span("engines", "rollout", 109.9999, 120.0)
    path = write_trace(tmp_path, read(tmp_path))
    assert path is not None
    found = json.loads(path.read_text(encoding="utf-8"))
    names = {event["tid"]: event["args"]["name"] for event in events(found, "M") if event["name"] == "thread_name"}
    assert [(names[each["tid"]], each["ts"], each["dur"]) for each in events(found, "X")] == [
        ("controller", 0, 10_000_000),
        ("controller, 2", 4_000_000, 10_000_000),
        ("controller, 3", 5_000_000, 10_000_000),
        ("controller", 10_000_000, 10_000_000),
    ]


def test_steps_do_not_overlap_although_their_rows_were_written_later():
    rows = [
        {"step": 0.0, "time_s": 110.05, "timeline/elapsed_s": 10.0},
        {"step": 1.0, "time_s": 120.01, "timeline/elapsed_s": 10.0},
        {"step": 2.0, "timing_s/step": 5.0},
    ]
    found = [
        (step.number, step.start_s, step.end_s) for step in read_timeline(Path("nowhere"), MetricTable.of(rows)).steps
    ]
    assert found == [(0, pytest.approx(100.05), 110.05), (1, 110.05, 120.01)]


def test_counters_of_long_runs_are_downsampled(tmp_path: Path):
    with RunDirectory(tmp_path):
        pass
    forwards = decode(1.7e9, np.full(8, 3 * MAX_COUNTER_POINTS))
    forwards["num_running"][::2] = 7
    append_forwards(tmp_path / "traces", 0, forwards)
    path = write_trace(tmp_path, read(tmp_path))
    assert path is not None
    counters = events(json.loads(path.read_text(encoding="utf-8")), "C")
    assert len(counters) <= MAX_COUNTER_POINTS + 1


def test_a_trace_of_a_long_run_holds_the_newest_steps_and_says_so(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = read(run_dir)
    assert num_steps_shown(run) == len(run.steps) == 6
    monkeypatch.setattr("launcher.report.chrome_trace.MAX_ENGINE_STEPS", 2 * NUM_ENGINES + 1)
    assert num_steps_shown(run) == 2
    path = write_trace(tmp_path, run)
    assert path is not None
    found = json.loads(path.read_text(encoding="utf-8"))
    slices = events(found, "X")
    assert [event["name"] for event in slices if event["name"].startswith("step ")] == ["step 5", "step 6"]
    assert found["otherData"]["notes"] == ["Only the newest 2 of 6 steps are shown."]
    assert found["otherData"]["started_at_s"] == pytest.approx(run.steps[-2].start_s, abs=0.5)
    # the engines' waits are those of the whole run's trace, cut at the first step
    waits = [event["dur"] for event in slices if event["name"] == "waits: trainer"]
    assert len(waits) == 2 * NUM_ENGINES and waits == pytest.approx([3e6] * len(waits), rel=1e-3)


def test_a_part_of_a_run_is_divided_as_in_the_whole_run(run_dir: Path):
    run = read(run_dir)
    for step in run.steps[1:]:
        whole = engine_timelines(run.forwards, run.spans, start_s=step.start_s, end_s=step.end_s, speed=run.speed)
        for found, wanted in zip(run.engines(step.start_s, step.end_s), whole, strict=True):
            assert np.array_equal(found.edges_s, wanted.edges_s)
            assert found.shares == pytest.approx(wanted.shares, abs=1e-6)  # seconds of a step in sums of other lengths


def test_incomplete_and_invalid_lines_are_counted_and_the_rest_is_shown(tmp_path: Path):
    write_run(tmp_path, num_steps=2)
    whole = len(read(tmp_path).spans)
    with (tmp_path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"actor": "trainer", "activity": "train", "start_s": NaN, "end_s": 2}\n[]\n{"actor": "trai')
    found = read(tmp_path)
    assert len(found.spans) == whole
    assert list(found.notes) == ["3 of 9 lines of events.jsonl could not be read; their spans are not shown."]


def test_spans_of_older_runs_are_read(tmp_path: Path):
    write_run(tmp_path, num_steps=2)
    events_file, spans = tmp_path / "events.jsonl", read(tmp_path).spans
    text = events_file.read_text(encoding="utf-8")
    events_file.write_text(text.replace('"actor"', '"who"').replace('"activity"', '"what"'), encoding="utf-8")
    assert read(tmp_path).spans == spans and '"who"' in events_file.read_text(encoding="utf-8")


def test_a_trace_without_spans_or_without_forwards_reports_it(tmp_path: Path):
    write_run(tmp_path, num_steps=2)
    (tmp_path / "events.jsonl").unlink()
    assert list(read(tmp_path).notes) == [
        "There is no events.jsonl, so the work of trainer and publisher is not shown."
    ]
    for path in (tmp_path / "traces").iterdir():
        path.unlink()
    found = read(tmp_path)
    assert found.bounds_s is None and len(found.notes) == 2
    assert write_trace(tmp_path, found) is None


def test_an_incomplete_record_is_left_out_and_removed_before_the_next_append(tmp_path: Path):
    forwards = decode(1.7e9, np.full(4, 3))
    append_forwards(tmp_path, 1, forwards)
    with (tmp_path / "engine-1.forwards").open("ab") as file:
        file.write(b"torn")
    (empty, found), is_cut = read_forwards(tmp_path, max_bytes=1 << 20)
    assert len(empty) == 0 and found.tobytes() == forwards.tobytes() and not is_cut
    drop_torn_record(tmp_path)
    append_forwards(tmp_path, 1, forwards)
    (_, found), _ = read_forwards(tmp_path, max_bytes=1 << 20)
    assert found.tobytes() == 2 * forwards.tobytes()


def test_the_newest_forwards_of_a_very_long_run_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path, num_steps=4)
    whole = read(tmp_path)
    num_bytes = sum(forwards.nbytes for forwards in whole.forwards)
    monkeypatch.setattr("launcher.report.run_timeline.MAX_FORWARD_BYTES", num_bytes // 2)
    found = read(tmp_path)
    assert list(found.steps) == [whole.steps[-1]]
    assert list(found.notes) == ["Older forwards were removed or are too many to show; only the newest step is shown."]
    assert FORWARD.itemsize * sum(map(len, found.forwards)) <= num_bytes // 2
    write_trace(tmp_path, found)
