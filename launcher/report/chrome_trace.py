"""`timeline.json`: a run in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

Each engine has a row with its work and its waits, and a counter of running requests. It waits in those starts of the
run only in which it also works: other starts may have had fewer engines. Further rows: trainer, publisher,
the controller's wait for responses, checkpoints and evaluations, steps. Consecutive forwards form one slice, and of a
long run only the newest steps are written, so that a browser can open the file of a run of days.

Invariants: events are sorted by time; no duration is negative; slices of a row do not overlap by rounding, because
starts and ends are rounded alike (microseconds since the run's first event).
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from launcher.report.lanes import Floats
from launcher.report.run_timeline import RunTimeline
from launcher.run_dir.atomic_files import replace_text
from rollout.tracing.forwards import Forwards
from rollout.tracing.timeline import GAP_S, PARTS, EngineTimeline, Part, Span

MAX_ENGINE_STEPS = 10_000
"""Steps in the file times engines: 156 steps of 64 engines."""
MAX_COUNTER_POINTS, MAX_ALL_COUNTER_POINTS = 20_000, 200_000
"""Counter points of one engine, and of all; a longer run shows every second forward, every third, and so on."""
WAITS = {
    Part.TAIL_WAIT: "waits: others sample",
    Part.TRAINER_WAIT: "waits: trainer",
    Part.PUBLISH: "waits: publish",
    Part.CHECKPOINT: "waits: checkpoint",
}
SAMPLING = "samples"
MAX_SKEW_S = 1e-3
"""Smallest real overlap of spans; a smaller one comes from different clocks for starts and ends."""
_AT_WORK = (Part.SATURATED, Part.UNDERFILLED, Part.GAP)
_PID = 1
Event = dict[str, object]


def write_trace(run_dir: Path, run: RunTimeline) -> Path | None:
    """Write `timeline.json` into `run_dir` and return its path; None, without a file, if nothing was recorded."""
    if run.bounds_s is None:
        return None
    target = run_dir / "timeline.json"
    trace = chrome_trace(run.newest(num_steps_shown(run)))
    replace_text(target, json.dumps(trace, separators=(",", ":")) + "\n")
    return target


def num_steps_shown(run: RunTimeline) -> int:
    """Steps of the run that its `timeline.json` holds, the newest ones."""
    return min(len(run.steps), max(1, MAX_ENGINE_STEPS // max(1, len(run.forwards))))


def chrome_trace(run: RunTimeline) -> Event:
    """The whole file as one JSON object."""
    if run.bounds_s is None:
        raise ValueError("the run recorded neither spans nor forwards, so it has no timeline")
    origin_s, end_s = run.bounds_s
    rows: dict[str, int] = {f"engine {number}": number for number in run.at_work(origin_s, end_s)}
    num_engines = len(run.forwards)
    events: list[Event] = []
    num_points = min(MAX_COUNTER_POINTS, MAX_ALL_COUNTER_POINTS // max(1, num_engines))
    starts_s = np.array(run.starts_s)
    for number, (timeline, forwards) in enumerate(zip(run.engines(origin_s, end_s), run.forwards, strict=True)):
        events += _slices(timeline, forwards, starts_s, row=number, origin_s=origin_s, forwards_each=run.forwards_each)
        events += _running(forwards, engine=number, origin_s=origin_s, num_points=num_points)
    for name, activity, start_s, stop_s in _lanes(run.spans):
        row = rows.setdefault(name, num_engines + len(rows))
        events.append(_slice(activity, start_s, stop_s, row=row, origin_s=origin_s))
    for step in run.steps:
        row = rows.setdefault("steps", num_engines + len(rows))
        # the metrics row of a step is written shortly after its last span
        start_s, stop_s = max(step.start_s, origin_s), min(step.end_s, end_s)
        if stop_s > start_s:
            events.append(_slice(f"step {step.number + 1}", start_s, stop_s, row=row, origin_s=origin_s))
    names = [_metadata("process_name", 0, {"name": "run"})]
    for name, row in rows.items():
        names.append(_metadata("thread_name", row, {"name": name}))
        names.append(_metadata("thread_sort_index", row, {"sort_index": row}))
    events.sort(key=lambda event: (event["ts"], event["tid"]))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"started_at_s": origin_s, "notes": list(run.notes)},
        "traceEvents": [*names, *events],
    }


def _lanes(spans: Sequence[Span]) -> Iterator[tuple[str, str, float, float]]:
    """Row, activity, start and end of each span; overlapping spans of a row get further rows."""
    ended_s: dict[str, float] = {}
    for span in spans:
        first = lane = _row_of(span)
        while ended_s.get(lane, -math.inf) - span.start_s > MAX_SKEW_S:
            lane = f"{first}, {2 if lane == first else int(lane.rpartition(' ')[2]) + 1}"
        start_s = min(max(span.start_s, ended_s.get(lane, -math.inf)), span.end_s)
        ended_s[lane] = max(span.end_s, ended_s.get(lane, -math.inf))
        yield lane, span.activity, start_s, span.end_s


def _row_of(span: Span) -> str:
    match span.activity:
        case "checkpoint" | "evaluate":
            return "checkpoint, evaluation"
        case "rollout":
            return "controller"
    return "publisher" if span.actor == "engines" else span.actor


def _slices(
    timeline: EngineTimeline,
    forwards: Forwards,
    starts_s: Floats,
    *,
    row: int,
    origin_s: float,
    forwards_each: int,
) -> Iterator[Event]:
    """Work and waits of one engine, neighbouring intervals of one kind joined; no slice while it has no work at all.

    `starts_s` are the begins of all starts of the run but the first, [S] wall clock, rising. A record of `forwards`
    stands for `forwards_each`.
    """
    kinds = np.array([0 if part in _AT_WORK else 1 + index for index, part in enumerate(PARTS)])
    kind = kinds[timeline.shares.argmax(axis=1)]
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(kind)) + 1])
    started = np.sort(forwards["started_at_s"])
    works_in = set(np.searchsorted(starts_s, started, side="right").tolist())
    for first, last in zip(firsts, [*firsts[1:], len(kind)], strict=True):
        start_s, end_s = float(timeline.edges_s[first]), float(timeline.edges_s[last])
        if start_s == end_s:
            continue
        if kind[first] == 0:
            seconds = np.diff(timeline.edges_s[first : last + 1]) @ timeline.shares[first:last]
            num_forwards = int(np.diff(np.searchsorted(started, [start_s, end_s])).item())
            arguments: Event = {
                "forwards": num_forwards * forwards_each,
                "saturated_share": round(float(seconds[PARTS.index(Part.SATURATED)]) / (end_s - start_s), 4),
            }
            yield {**_slice(SAMPLING, start_s, end_s, row=row, origin_s=origin_s), "args": arguments}
        elif np.searchsorted(starts_s, start_s, side="right").item() not in works_in:
            continue
        elif (name := WAITS.get(PARTS[kind[first] - 1])) is not None:
            yield _slice(name, start_s, end_s, row=row, origin_s=origin_s)


def _running(forwards: Forwards, *, engine: int, origin_s: float, num_points: int) -> Iterator[Event]:
    """Counter of running requests: set at starts of forwards, 0 from the end of a forward before a pause."""
    starts = forwards["started_at_s"]
    ends = starts + forwards["seconds"]
    is_last = np.append(starts[1:] - ends[:-1] >= GAP_S, True)[: len(forwards)]
    shown = slice(None, None, max(1, -(-len(forwards) // num_points)))
    at_s = np.concatenate([starts[shown], ends[is_last]])
    requests = np.concatenate([forwards["num_running"][shown], np.zeros(is_last.sum(), dtype=np.int32)])
    order = np.argsort(at_s, kind="stable")
    at_s, requests = at_s[order], requests[order]
    changed = np.diff(requests, prepend=-1) != 0
    for moment, count in zip(at_s[changed].tolist(), requests[changed].tolist(), strict=True):
        yield {
            "name": f"engine {engine}: running requests",
            "ph": "C",
            "pid": _PID,
            "tid": engine,
            "ts": _microseconds(moment, origin_s),
            "args": {"requests": count},
        }


def _slice(name: str, start_s: float, end_s: float, *, row: int, origin_s: float) -> Event:
    start, end = _microseconds(start_s, origin_s), _microseconds(end_s, origin_s)
    return {"name": name, "ph": "X", "pid": _PID, "tid": row, "ts": start, "dur": end - start}


def _microseconds(at_s: float, origin_s: float) -> int:
    return round((at_s - origin_s) * 1e6)


def _metadata(kind: str, row: int, arguments: Event) -> Event:
    return {"name": kind, "ph": "M", "pid": _PID, "tid": row, "args": arguments}
