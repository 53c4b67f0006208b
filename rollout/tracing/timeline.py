"""Divides the time of each engine into parts: running forwards, waiting for another process, or idle.

The division uses the activities of each actor (forwards of engines, spans of the others), not phases in sequence. An
engine that samples while the trainer trains is busy; an engine without work then waits for the trainer.
A moment of an engine belongs to the first row that holds:

    a forward runs     saturated / underfilled   split by `rollout.tracing.engine_speed`
    a publish          publish                   weights travel, or trainer and engine swap device memory
    less than GAP_S    gap                       between two forwards: scheduling, drafting, output
    a checkpoint       checkpoint
    training           trainer_wait
    others sample      tail_wait                 other engines still sample and this engine has no work
    anything else      other                     missing rewards, the controller, set-up

Invariants: parts are not negative, and they sum to the time between start and end however intervals overlap.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.tracing.engine_speed import EngineSpeed
from rollout.tracing.forwards import Forwards

GAP_S = 0.1
"""Longest pause between two forwards that counts as host work; during a longer pause the engine was idle."""

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Part(enum.Enum):
    """Kind of a moment of an engine. All but the first are the bubble; all but the first two are idle."""

    SATURATED = "saturated"
    """The share of forwards that a saturated engine would have needed for the same tokens."""
    UNDERFILLED = "underfilled"
    """The rest of forwards: too few requests shared the fixed cost of a forward."""
    TAIL_WAIT = "tail_wait"
    TRAINER_WAIT = "trainer_wait"
    PUBLISH = "publish"
    GAP = "gap"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


PARTS = tuple(Part)

_WAITS = {
    ("publisher", "publish"): Part.PUBLISH,
    ("engines", "switch"): Part.PUBLISH,
    ("trainer", "checkpoint"): Part.CHECKPOINT,
    ("trainer", "train"): Part.TRAINER_WAIT,
    ("trainer", "switch"): Part.TRAINER_WAIT,
}
"""Part of an engine without a forward, by (actor, activity) of a span (`megatron_rl.controller.phases`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An activity of an actor, as `events.jsonl` records it; times are wall clock."""

    actor: str
    """`engines`, `trainer` or `publisher`."""
    activity: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeline:
    """One engine from `edges_s[0]` to `edges_s[-1]`, cut into K adjacent moments."""

    edges_s: Floats
    """[K + 1] wall clock, rising."""
    shares: Floats
    """[K, parts] of each moment, in the order of `PARTS`. Rows sum to 1; only moments with forwards mix parts."""

    def seconds(self) -> dict[Part, float]:
        """Seconds by part; they sum to the time between the first edge and the last."""
        return dict(zip(PARTS, (np.diff(self.edges_s) @ self.shares).tolist(), strict=True))

    def binned(self, edges_s: Floats) -> Floats:
        """Mean share of each part between neighbouring `edges_s`, [bins, parts]; 0 outside of the timeline."""
        seconds = np.diff(self.edges_s)[:, None] * self.shares
        until = np.concatenate([np.zeros((1, len(PARTS))), np.cumsum(seconds, axis=0)])
        at = np.stack([np.interp(edges_s, self.edges_s, column) for column in until.T], axis=1)
        return np.asarray(np.diff(at, axis=0) / np.diff(edges_s)[:, None])


def engine_timelines(
    forwards: Sequence[Forwards],
    spans: Sequence[Span],
    *,
    start_s: float,
    end_s: float,
    speed: EngineSpeed | None,
    cut_at_forwards: bool = True,
) -> list[EngineTimeline]:
    """One timeline for each engine, from `start_s` to `end_s` > `start_s`.

    Args:
        forwards: of each engine; forwards outside of the time are ignored.
        spans: of all actors. Unknown spans are ignored, and spans that end before they start.
        start_s: wall clock.
        end_s: wall clock.
        speed: None where it is not known; then all time of forwards counts as saturated.
        cut_at_forwards: False for moments that hold many forwards and the pauses between them. The seconds are the
            same, and hundreds of engines cost little.

    Raises:
        ValueError: `end_s` does not exceed `start_s`.
    """
    if not end_s > start_s:
        raise ValueError(f"a timeline from {start_s} to {end_s} has no length")
    # wall clocks have ten digits before the point, so sums and comparisons use seconds since the start
    length_s = end_s - start_s
    shifted = [
        (part, span.start_s - start_s, span.end_s - start_s)
        for span in spans
        if (part := _WAITS.get((span.actor, span.activity))) is not None and span.end_s > span.start_s
    ]
    waits = {
        part: _Coverage.of(np.array([(a, b) for kind, a, b in shifted if kind is part]).reshape(-1, 2))
        for part in _PRIORITY
    }
    runs = [_Runs.of(of_engine, speed, origin_s=start_s) for of_engine in forwards]
    together = _Coverage.of(np.concatenate([np.zeros((0, 2)), *(engine.stretches for engine in runs)]))
    return [
        _timeline(
            engine,
            cuts=engine.forwards if cut_at_forwards else engine.stretches,
            together=together,
            waits=waits,
            start_s=start_s,
            length_s=length_s,
        )
        for engine in runs
    ]


_PRIORITY = (Part.PUBLISH, Part.CHECKPOINT, Part.TRAINER_WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """When one engine runs forwards, in seconds since the start of the timeline."""

    forwards: Floats
    """[N, 2] start and end of each forward, rising; no two overlap."""
    saturated: Floats
    """[N] in [0, 1]: share of each forward that a saturated engine would have needed."""
    stretches: Floats
    """[S, 2] start and end of forwards with less than `GAP_S` between them."""

    @classmethod
    def of(cls, forwards: Forwards, speed: EngineSpeed | None, *, origin_s: float) -> "_Runs":
        started_s = forwards["started_at_s"]
        if (started_s[1:] >= started_s[:-1]).all():  # nearly always; a copy of all records is avoided
            ordered = forwards
        else:
            ordered = forwards[np.argsort(started_s, kind="stable")]
        intervals = _intervals(ordered, origin_s=origin_s)
        return cls(
            forwards=intervals,
            saturated=np.ones(len(ordered)) if speed is None else speed.saturated_shares(ordered),
            stretches=_stretches(intervals),
        )

    def worked_until(self, moments: Floats) -> Floats:
        """Seconds of forwards before each moment, and the saturated ones of them, [len(moments), 2]."""
        if not len(self.forwards):
            return np.zeros((len(moments), 2))
        seconds = np.diff(self.forwards, axis=1)[:, 0]
        per_second = np.stack([np.ones(len(seconds)), self.saturated], axis=1)
        before = np.concatenate([np.zeros((1, 2)), np.cumsum(per_second * seconds[:, None], axis=0)])
        number = np.searchsorted(self.forwards[:, 0], moments, side="right") - 1  # of the last one that has begun
        begun = np.maximum(number, 0)
        within = np.clip(moments - self.forwards[begun, 0], 0.0, seconds[begun])
        return np.asarray(before[begun] + per_second[begun] * within[:, None])


def _intervals(forwards: Forwards, *, origin_s: float) -> Floats:
    """Start and end of each forward, [N, 2] seconds since `origin_s`, rising and without overlap.

    A device runs forwards one after another; the next may be launched while the current one still runs.
    """
    seconds = np.maximum(forwards["seconds"].astype(np.float64), 0)
    launched = forwards["started_at_s"] - origin_s
    until = np.cumsum(seconds)
    begins = np.maximum.accumulate(launched - (until - seconds)) + (until - seconds)
    return np.stack([begins, begins + seconds], axis=1)


def _stretches(intervals: Floats) -> Floats:
    """Join intervals with less than `GAP_S` between them, [S, 2]."""
    if not len(intervals):
        return intervals
    cuts = np.flatnonzero(intervals[1:, 0] - intervals[:-1, 1] >= GAP_S) + 1
    return np.stack([intervals[np.r_[0, cuts], 0], intervals[np.r_[cuts - 1, len(intervals) - 1], 1]], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coverage:
    """How many of many intervals cover a moment."""

    begins: Floats
    """Starts of all intervals, rising."""
    ends: Floats
    """Ends of all intervals, rising."""
    bounds: Floats
    """Starts and ends at which the number of intervals becomes, or was, 0 or 1, rising."""

    @classmethod
    def of(cls, intervals: Floats) -> "_Coverage":
        """Intervals [N, 2] in any order."""
        begins, ends = np.sort(intervals[:, 0]), np.sort(intervals[:, 1])
        # before each start and after each end
        open_before = np.arange(len(begins)) - np.searchsorted(ends, begins, side="right")
        open_after = np.searchsorted(begins, ends, side="left") - np.arange(1, len(ends) + 1)
        bounds = np.concatenate([begins[open_before <= 1], ends[open_after <= 1]])
        return cls(begins=begins, ends=ends, bounds=np.sort(bounds))

    def count(self, at: Floats) -> npt.NDArray[np.int64]:
        """Number of intervals at each moment, [len(at)]."""
        begun = np.searchsorted(self.begins, at, side="right")
        return np.asarray(begun - np.searchsorted(self.ends, at, side="right"))


def _timeline(
    engine: _Runs,
    *,
    cuts: Floats,
    together: _Coverage,
    waits: Mapping[Part, _Coverage],
    start_s: float,
    length_s: float,
) -> EngineTimeline:
    """Cut the time, and give the time of each moment without a forward to the first part that holds.

    `cuts` are intervals at which the time is cut, [C, 2], at least at those of stretches; `together` the stretches of
    all engines, this one included; `waits` the intervals of each waiting part.
    """
    # whether others sample changes where the number of all stretches passes 0 or 1, or where an own stretch ends
    bounds = [cuts.ravel(), together.bounds, *(wait.bounds for wait in waits.values())]
    inside = np.concatenate([edges[(edges > 0) & (edges < length_s)] for edges in bounds])
    edges = np.unique(np.concatenate([[0.0, length_s], inside]))
    middles = (edges[:-1] + edges[1:]) / 2
    shares = np.zeros((len(middles), len(PARTS)))
    worked = np.clip(np.diff(engine.worked_until(edges), axis=0) / np.diff(edges)[:, None], 0.0, 1.0)
    shares[:, PARTS.index(Part.SATURATED)] = np.minimum(worked[:, 1], worked[:, 0])
    shares[:, PARTS.index(Part.UNDERFILLED)] = worked[:, 0] - np.minimum(worked[:, 1], worked[:, 0])
    rest, free = 1 - worked[:, 0], np.ones(len(middles), dtype=bool)

    def give(part: Part, holds: Flags) -> None:
        shares[holds & free, PARTS.index(part)] = rest[holds & free]
        free[holds] = False

    give(Part.PUBLISH, waits[Part.PUBLISH].count(middles) > 0)
    stretches = _Coverage.of(engine.stretches).count(middles)
    give(Part.GAP, stretches > 0)
    give(Part.CHECKPOINT, waits[Part.CHECKPOINT].count(middles) > 0)
    give(Part.TRAINER_WAIT, waits[Part.TRAINER_WAIT].count(middles) > 0)
    give(Part.TAIL_WAIT, together.count(middles) > stretches)
    give(Part.OTHER, free.copy())
    return EngineTimeline(edges_s=edges + start_s, shares=shares)


def timeline_metrics(engines: Sequence[EngineTimeline], speed: EngineSpeed | None) -> dict[str, float]:
    """Flat metrics: shares of the elapsed time, means over the engines; none without engines.

        idle_share = tail_wait_share + trainer_wait_share + publish_share + gap_share + checkpoint_share + other_share
        bubble     = idle_share + underfilled_share
        tail_share = tail_wait_share + underfilled_share

    Without a speed, full and underfilled forwards look alike: `bubble`, `tail_share`, `underfilled_share` and
    `saturated_requests` are left out.
    """
    if not engines:
        return {}
    elapsed_s = float(engines[0].edges_s[-1] - engines[0].edges_s[0])
    by_engine = [engine.seconds() for engine in engines]
    share = {part: sum(seconds[part] for seconds in by_engine) / (len(engines) * elapsed_s) for part in PARTS}
    idle = {part: share[part] for part in PARTS if part not in (Part.SATURATED, Part.UNDERFILLED)}
    metrics = {"timeline/elapsed_s": elapsed_s, "timeline/idle_share": sum(idle.values())}
    metrics |= {f"timeline/{part.value}_share": value for part, value in idle.items()}
    if speed is not None:
        metrics |= {
            "timeline/bubble": sum(idle.values()) + share[Part.UNDERFILLED],
            "timeline/underfilled_share": share[Part.UNDERFILLED],
            "timeline/tail_share": share[Part.UNDERFILLED] + share[Part.TAIL_WAIT],
            "timeline/saturated_requests": float(speed.saturated_requests),
        }
    return metrics
