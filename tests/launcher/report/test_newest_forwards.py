"""The last step of a run is shown whole, thinned where it has too many forwards to show each."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from launcher.report.chrome_trace import write_trace
from launcher.report.metric_table import MetricTable
from launcher.report.newest_forwards import newest_forwards
from launcher.report.run_timeline import RunTimeline, read_timeline
from launcher.report.timeline_section import timeline_section
from launcher.report.write import write_report
from launcher.run_dir.forward_traces import append_forwards
from rollout.tracing.forwards import FORWARD, Forwards
from rollout.tracing.timeline import PARTS, Part
from tests.support.runs.synthetic_run import NUM_ENGINES, write_run

ORIGIN_S, STEP_S = 1.7e9, 100.0
CUT = "Older forwards were removed or are too many to show; only the newest step is shown."
RECORD = FORWARD.itemsize


def read(path: Path) -> RunTimeline:
    return read_timeline(path, MetricTable.read(path))


def steady(start_s: float, *, num: int, seconds: float, gap_s: float, pauses: Sequence[tuple[int, float]] = ()):
    """Forwards of different sizes with `gap_s` between them, and longer pauses before some of them."""
    before = np.full(num, gap_s)
    for number, pause_s in pauses:
        before[number] = pause_s
    forwards = np.zeros(num, dtype=FORWARD)
    forwards["num_running"] = 1 + np.arange(num) % 64
    forwards["num_scheduled_tokens"] = 2 * forwards["num_running"]
    forwards["num_context_tokens"] = 3000 * forwards["num_running"]
    forwards["seconds"] = seconds * (1 + forwards["num_running"] / 64)
    forwards["started_at_s"] = start_s + np.cumsum(before + np.append(0.0, forwards["seconds"][:-1]))
    return forwards


def write_steps(path: Path, by_step: Sequence[Sequence[Forwards]]) -> None:
    """A run directory with these forwards of each engine, by step."""
    (path / "traces").mkdir(parents=True)
    rows = [
        {"step": step, "time_s": ORIGIN_S + STEP_S * (step + 1), "timing_s/step": STEP_S}
        for step in range(len(by_step))
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for of_engines in by_step:
        for engine, forwards in enumerate(of_engines):
            append_forwards(path / "traces", engine, forwards)


def shown_share(run: RunTimeline, part: Part) -> float:
    """Of the last step's time, over all engines."""
    step = run.steps[-1]
    seconds = [engine.seconds()[part] for engine in run.engines(step.start_s, step.end_s)]
    return sum(seconds) / len(seconds) / (step.end_s - step.start_s)


@pytest.mark.parametrize("divisor", [5, 10, 20])
def test_a_last_step_beyond_the_budget_is_thinned_and_divided_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divisor: int
) -> None:
    write_run(tmp_path, num_steps=3)
    whole = read(tmp_path)
    last = whole.steps[-1]
    budget = sum(forwards.nbytes for forwards in whole.forwards) // divisor
    monkeypatch.setattr("launcher.report.run_timeline.MAX_FORWARD_BYTES", budget)
    found = read(tmp_path)
    each = found.forwards_each
    assert list(found.steps) == [last] and each > 1
    assert list(found.notes) == [
        CUT,
        "The last step has too many forwards to show each. They were left out evenly: each one shown stands for "
        f"{each} in a row.",
    ]
    assert RECORD * sum(map(len, found.forwards)) <= budget + RECORD * NUM_ENGINES
    for before, after in zip(whole.forwards, found.forwards, strict=True):
        since = before[before["started_at_s"] >= last.start_s]
        assert after["started_at_s"].tolist() == since["started_at_s"][::each].tolist()
        assert after["seconds"].sum() == pytest.approx(since["seconds"].sum(), rel=1e-5)
    assert whole.speed is not None and found.speed is not None
    assert found.speed.fixed_s == pytest.approx(whole.speed.fixed_s, rel=0.02)  # of one forward
    for part in PARTS:
        assert shown_share(found, part) == pytest.approx(shown_share(whole, part), abs=0.002), part


def test_the_pages_show_the_last_step_of_a_run_with_many_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, num_steps=3)
    num_bytes = sum(forwards.nbytes for forwards in read(tmp_path).forwards)
    monkeypatch.setattr("launcher.report.run_timeline.MAX_FORWARD_BYTES", num_bytes // 20)
    found, metrics = read(tmp_path), MetricTable.read(tmp_path)
    page = timeline_section(found, metrics)
    assert "<figcaption>The last step</figcaption>" in page and CUT in page
    assert f"stands for {found.forwards_each} in a row." in page
    assert "timeline.json holds the newest 1 of 3 steps and opens in ui.perfetto.dev." in page
    assert "The last step</figcaption>" in write_report(tmp_path).read_text(encoding="utf-8")
    path = write_trace(tmp_path, found)
    assert path is not None
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["otherData"]["notes"] == list(found.notes)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 0]
    num_forwards = sum(event["args"]["forwards"] for event in slices if event["name"] == "samples")
    recorded = np.fromfile(tmp_path / "traces" / "engine-0.forwards", dtype=FORWARD)["started_at_s"]
    assert 0 <= num_forwards - (recorded >= found.steps[0].start_s).sum() < found.forwards_each


def test_an_engine_with_far_more_forwards_than_others_is_read_back_to_the_begin_of_the_step(tmp_path: Path) -> None:
    """They fit into the budget together, so none is left out."""
    many = [steady(ORIGIN_S + STEP_S * step, num=400, seconds=0.1, gap_s=0.01) for step in range(2)]
    few = [steady(ORIGIN_S + STEP_S * step, num=10, seconds=0.1, gap_s=0.01) for step in range(2)]
    write_steps(tmp_path, [list(engines) for engines in zip(many, few, few, few, strict=True)])
    found = newest_forwards(tmp_path / "traces", since_s=ORIGIN_S + STEP_S, max_bytes=500 * RECORD)
    assert found.is_cut and found.forwards_each == 1
    assert [forwards.tobytes() for forwards in found.by_engine] == [many[1].tobytes(), *[few[1].tobytes()] * 3]


def test_a_forward_that_runs_at_the_begin_of_the_last_step_is_shown(tmp_path: Path) -> None:
    forwards = steady(ORIGIN_S, num=400, seconds=0.1, gap_s=0.01)
    append_forwards(tmp_path, 0, forwards)
    since_s = float(forwards["started_at_s"][200]) + 0.05
    found = newest_forwards(tmp_path, since_s=since_s, max_bytes=100 * RECORD)
    (thinned,) = found.by_engine
    assert (found.forwards_each, thinned["started_at_s"][0]) == (2, forwards["started_at_s"][200])


def test_an_engine_that_began_in_the_last_step_leaves_the_step_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files hold no forward from before the step, however much is read."""
    first = [steady(ORIGIN_S + STEP_S * step, num=200, seconds=0.2, gap_s=0.01) for step in range(3)]
    late = steady(ORIGIN_S + 2 * STEP_S + 5, num=200, seconds=0.2, gap_s=0.01)
    write_steps(tmp_path, [[first[0]], [first[1]], [first[2], late]])
    spans = [
        {"actor": "engines", "activity": "rollout", "start_s": ORIGIN_S + start_s, "end_s": ORIGIN_S + start_s + 2}
        for start_s in (STEP_S + 1, 2 * STEP_S + 1)
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans), encoding="utf-8")
    monkeypatch.setattr("launcher.report.run_timeline.MAX_FORWARD_BYTES", 800 * RECORD)
    found = read(tmp_path)
    assert [step.number for step in found.steps] == [2] and list(found.notes) == [CUT]
    assert [span.start_s for span in found.spans] == [spans[1]["start_s"]]  # those of the step, all of them
    assert found.forwards[1].tobytes() == late.tobytes() and found.forwards_each == 1


@pytest.mark.parametrize("gap_s", [0.0, 0.004, 0.06])
def test_thinning_keeps_pauses_and_makes_none(tmp_path: Path, gap_s: float) -> None:
    """Host work of all forwards of a record, 0.06 s after each, is longer than the shortest pause."""
    forwards = steady(ORIGIN_S, num=1000, seconds=0.02, gap_s=gap_s, pauses=[(333, 7.0), (807, 2.0)])
    append_forwards(tmp_path, 0, forwards)
    since_s = float(forwards["started_at_s"][0])
    found = newest_forwards(tmp_path, since_s=since_s, max_bytes=100 * RECORD)
    (thinned,) = found.by_engine
    assert found.forwards_each == 10 and len(thinned) == 100
    gaps = np.diff(thinned["started_at_s"]) - thinned["seconds"][:-1]
    assert gaps.min() > -1e-5
    assert sorted(gaps)[-2:] == pytest.approx([2.0, 7.0], abs=0.1) and sorted(gaps)[-3] < 0.1
    means = forwards["num_running"].reshape(100, 10).mean(axis=1)
    assert np.abs(thinned["num_running"] - means).max() <= 0.5
    if gap_s < 0.01:  # all host work of a record can stay free
        assert thinned["seconds"].sum() == pytest.approx(forwards["seconds"].sum(), rel=1e-5)


def test_a_run_without_steps_has_a_note_that_names_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, [[steady(ORIGIN_S, num=200, seconds=0.1, gap_s=0.01)]])
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n', encoding="utf-8")
    monkeypatch.setattr("launcher.report.run_timeline.MAX_FORWARD_BYTES", 100 * RECORD)
    found = read(tmp_path)
    assert found.notes[1] == "Older forwards were removed or are too many to show." and len(found.forwards[0]) == 100
    assert timeline_section(found, MetricTable.read(tmp_path))
