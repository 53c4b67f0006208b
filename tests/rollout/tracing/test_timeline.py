import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tracing.engine_speed import EngineSpeed
from rollout.tracing.forwards import FORWARD
from rollout.tracing.timeline import GAP_S, PARTS, Part, Span, engine_timelines, timeline_metrics

ORIGIN_S = 1.7e9
HALF = EngineSpeed(fixed_s=1.0, token_s=0.0, context_s=0.0, saturated_requests=4)
"""A forward of two requests is half full."""


def forwards(*runs: tuple[float, float, int]):
    """Forwards given as (start in seconds, duration in seconds, running requests)."""
    return np.array([(ORIGIN_S + start, num, 0, num, 0, seconds) for start, seconds, num in runs], dtype=FORWARD)


def span(actor: str, activity: str, start_s: float, end_s: float) -> Span:
    return Span(actor=actor, activity=activity, start_s=ORIGIN_S + start_s, end_s=ORIGIN_S + end_s)


def decompose(engines, spans, start_s, end_s, speed=HALF):
    found = engine_timelines(engines, spans, start_s=ORIGIN_S + start_s, end_s=ORIGIN_S + end_s, speed=speed)
    return [{part: seconds for part, seconds in one.seconds().items() if seconds > 1e-6} for one in found]


def close(*expected: dict[Part, float]):
    return [pytest.approx(one, abs=1e-5) for one in expected]


def test_a_synchronous_step_of_two_engines_equals_the_hand_computed_parts():
    engines = [
        forwards((0.0, 1.0, 4), (1.05, 1.0, 2), (2.10, 3.9, 1)),
        forwards((0.0, 2.0, 4)),
    ]
    spans = [
        span("engines", "rollout", 0, 6.5),
        span("trainer", "train", 6.5, 8),
        span("publisher", "publish", 8, 9),
        span("trainer", "checkpoint", 9, 9.5),
    ]
    assert decompose(engines, spans, 0, 10) == close(
        {
            Part.SATURATED: 1.0 + 0.5 + 3.9 / 4,
            Part.UNDERFILLED: 0.5 + 3.9 * 3 / 4,
            Part.GAP: 0.1,
            Part.TRAINER_WAIT: 1.5,
            Part.PUBLISH: 1.0,
            Part.CHECKPOINT: 0.5,
            Part.OTHER: 1.0,
        },
        {
            Part.SATURATED: 2.0,
            Part.TAIL_WAIT: 4.0,
            Part.TRAINER_WAIT: 1.5,
            Part.PUBLISH: 1.0,
            Part.CHECKPOINT: 0.5,
            Part.OTHER: 1.0,
        },
    )


def test_time_counts_as_publish_or_trainer_wait_only_while_no_forward_runs():
    engines = [forwards((0.0, 4.0, 4), (4.3, 1.7, 4))]
    spans = [span("trainer", "train", 0, 3), span("publisher", "publish", 3, 4.3), span("trainer", "train", 4.3, 7)]
    (found,) = decompose(engines, spans, 0, 7)
    assert found == pytest.approx({Part.SATURATED: 5.7, Part.PUBLISH: 0.3, Part.TRAINER_WAIT: 1.0}, abs=1e-5)


def test_a_forward_launched_during_another_starts_after_it():
    (found,) = decompose([forwards((0.0, 1.0, 4), (0.2, 1.0, 4), (0.4, 1.0, 4))], [], 0, 4)
    assert found == pytest.approx({Part.SATURATED: 3.0, Part.OTHER: 1.0}, abs=1e-5)


def test_a_short_pause_of_the_host_does_not_count_as_trainer_wait():
    pause = GAP_S / 2
    (found,) = decompose([forwards((0, 1, 4), (1 + pause, 1, 4))], [span("trainer", "train", 0, 3)], 0, 3)
    assert found == pytest.approx({Part.SATURATED: 2, Part.GAP: pause, Part.TRAINER_WAIT: 1 - pause}, abs=1e-5)


def test_a_switch_counts_for_the_side_that_gets_the_device():
    spans = [span("trainer", "switch", 0, 1), span("engines", "switch", 1, 3)]
    (found,) = decompose([forwards()], spans, 0, 3)
    assert found == pytest.approx({Part.TRAINER_WAIT: 1, Part.PUBLISH: 2})


def test_metrics_sum_over_engines_and_leave_out_the_bubble_without_a_speed():
    engines = engine_timelines(
        [forwards((0.0, 4.0, 2)), forwards((0.0, 1.0, 4))],
        [span("trainer", "train", 5, 7)],
        start_s=ORIGIN_S,
        end_s=ORIGIN_S + 8,
        speed=HALF,
    )
    found = timeline_metrics(engines, HALF)
    assert found == pytest.approx(
        {
            "timeline/elapsed_s": 8.0,
            "timeline/bubble": 1 - (2 + 1) / 16,
            "timeline/idle_share": 11 / 16,
            "timeline/underfilled_share": 2 / 16,
            "timeline/tail_wait_share": 3 / 16,
            "timeline/tail_share": 5 / 16,
            "timeline/trainer_wait_share": 4 / 16,
            "timeline/publish_share": 0.0,
            "timeline/gap_share": 0.0,
            "timeline/checkpoint_share": 0.0,
            "timeline/other_share": 4 / 16,
            "timeline/saturated_requests": 4.0,
        },
        abs=1e-6,
    )
    unknown = {"timeline/bubble", "timeline/underfilled_share", "timeline/tail_share", "timeline/saturated_requests"}
    assert set(found) - set(timeline_metrics(engines, None)) == unknown
    assert timeline_metrics([], HALF) == {}


def test_an_empty_interval_is_refused():
    with pytest.raises(ValueError, match="no length"):
        engine_timelines([], [], start_s=1.0, end_s=1.0, speed=None)


MOMENTS = st.floats(-2, 12, allow_nan=False)
KINDS = st.sampled_from(
    [("publisher", "publish"), ("engines", "switch"), ("trainer", "train"), ("trainer", "checkpoint"), ("x", "y")]
)
SPANS = st.lists(st.builds(lambda kind, a, b: span(*kind, a, b), KINDS, MOMENTS, MOMENTS), max_size=8)
ENGINES = st.lists(
    st.lists(st.tuples(MOMENTS, st.floats(0, 3), st.integers(0, 8)), max_size=8).map(lambda runs: forwards(*runs)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(engines=ENGINES, spans=SPANS, speed=st.sampled_from([HALF, None]))
def test_parts_are_not_negative_and_sum_to_the_elapsed_time(engines, spans, speed):
    found = engine_timelines(engines, spans, start_s=ORIGIN_S, end_s=ORIGIN_S + 10, speed=speed)
    for engine, of_one in zip(found, engines, strict=True):
        seconds = engine.seconds()
        assert min(seconds.values()) >= 0
        assert sum(seconds.values()) == pytest.approx(10, abs=1e-5)
        assert (np.diff(engine.edges_s) >= 0).all()
        assert seconds[Part.SATURATED] + seconds[Part.UNDERFILLED] <= of_one["seconds"].sum() + 1e-5
        assert seconds[Part.SATURATED] == pytest.approx(_saturated_slowly(of_one, speed), abs=1e-4)


def _saturated_slowly(of_one, speed) -> float:
    """The reference: a loop over forwards, each clipped to the ten seconds."""
    total, free_at = 0.0, -1e9
    for forward in of_one[np.argsort(of_one["started_at_s"], kind="stable")]:
        begin = max(float(forward["started_at_s"]) - ORIGIN_S, free_at)
        free_at = begin + float(forward["seconds"])
        share = 1.0 if speed is None else min(int(forward["num_running"]) / speed.saturated_requests, 1.0)
        total += share * max(0.0, min(free_at, 10.0) - max(begin, 0.0))
    return total


@settings(max_examples=150, deadline=None)
@given(engines=ENGINES, spans=SPANS, speed=st.sampled_from([HALF, None]))
def test_seconds_are_the_same_without_a_cut_at_each_forward(engines, spans, speed):
    bounds = {"start_s": ORIGIN_S, "end_s": ORIGIN_S + 10, "speed": speed}
    found = engine_timelines(engines, spans, cut_at_forwards=False, **bounds)
    for coarse, fine in zip(found, engine_timelines(engines, spans, **bounds), strict=True):
        assert coarse.seconds() == pytest.approx(fine.seconds(), abs=1e-5)
        assert len(coarse.edges_s) <= len(fine.edges_s)


@settings(max_examples=150, deadline=None)
@given(engines=ENGINES)
def test_time_without_work_is_a_wait_for_the_tail_if_and_only_if_another_engine_samples(engines):
    """The reference asks each other engine alone."""
    alone = engine_timelines(engines, [], start_s=ORIGIN_S, end_s=ORIGIN_S + 10, speed=None)
    moments = np.linspace(ORIGIN_S + 0.013, ORIGIN_S + 9.987, 200)

    def samples(number):
        (one,) = engine_timelines([engines[number]], [], start_s=ORIGIN_S, end_s=ORIGIN_S + 10, speed=None)
        return one.shares[np.searchsorted(one.edges_s, moments) - 1][:, PARTS.index(Part.OTHER)] < 0.5

    working = [samples(number) for number in range(len(engines))]
    for number, one in enumerate(alone):
        others = np.any([of for other, of in enumerate(working) if other != number] or [moments < 0], axis=0)
        waits = one.shares[np.searchsorted(one.edges_s, moments) - 1][:, PARTS.index(Part.TAIL_WAIT)] > 0.5
        assert np.array_equal(waits, others & ~working[number])


@settings(max_examples=50, deadline=None)
@given(engines=ENGINES, spans=SPANS)
def test_a_binned_timeline_has_the_same_seconds(engines, spans):
    edges_s = np.linspace(ORIGIN_S, ORIGIN_S + 10, 41)
    for engine in engine_timelines(engines, spans, start_s=ORIGIN_S, end_s=ORIGIN_S + 10, speed=HALF):
        shares = engine.binned(edges_s)
        assert shares.min() >= -1e-5
        assert shares.sum(axis=1) == pytest.approx(1.0, abs=1e-4)
        seconds = engine.seconds()
        assert shares.sum(axis=0) * 0.25 == pytest.approx([seconds[part] for part in PARTS], abs=1e-4)
