import numpy as np
import pytest

from launcher.run_dir.step_timeline import FITTED_PER_STEP, StepTimeline
from rollout.tracing.forwards import FORWARD
from tests.support.runs.synthetic_run import ORIGIN_S, decode


def none():
    return np.zeros(0, dtype=FORWARD)


def one(start_s: float, seconds: float, requests: int = 4):
    return np.array([(ORIGIN_S + start_s, requests, 0, requests, 0, seconds)], dtype=FORWARD)


def test_step_intervals_have_no_gap_and_the_first_begins_with_its_rollout():
    timeline = StepTimeline(1)
    timeline.add_forwards([one(1, 4)])
    first = timeline.close(ORIGIN_S + 10, step_s=8.0)
    timeline.add_span("trainer", "checkpoint", ORIGIN_S + 10, ORIGIN_S + 13)
    timeline.add_forwards([one(14, 2)])
    second = timeline.close(ORIGIN_S + 20, step_s=7.0)
    assert first["timeline/elapsed_s"] == pytest.approx(8)
    assert first["timeline/idle_share"] == pytest.approx(1 - 3 / 8)
    assert second["timeline/elapsed_s"] == pytest.approx(10)
    assert second["timeline/checkpoint_share"] == pytest.approx(0.3)
    assert second["timeline/idle_share"] == pytest.approx(0.8)


def test_an_activity_across_the_end_of_a_step_is_split_between_both_steps():
    timeline = StepTimeline(2)
    timeline.add_forwards([one(0, 15), none()])
    timeline.add_span("trainer", "train", ORIGIN_S + 8, ORIGIN_S + 12)
    assert timeline.close(ORIGIN_S + 10, step_s=10.0)["timeline/idle_share"] == pytest.approx(0.5)
    timeline.add_forwards([none(), none()])
    second = timeline.close(ORIGIN_S + 20, step_s=10.0)
    assert second["timeline/idle_share"] == pytest.approx(0.75)
    assert second["timeline/trainer_wait_share"] == pytest.approx(0.1)


def test_an_engine_that_was_given_up_counts_until_the_end_of_that_step():
    """Engine 0 is busy all the time; engine 1 is given up after 4 s, and its successor never comes."""
    timeline = StepTimeline(2)
    idle = []
    for step, of_lost in enumerate((one(0, 4), none(), none())):
        timeline.add_forwards([one(10 * step, 10), of_lost])
        metrics = timeline.close(ORIGIN_S + 10 * (step + 1), step_s=10.0, retired=(1,))
        idle.append((metrics["timeline/idle_share"], metrics["timeline/tail_wait_share"]))
    assert idle == [pytest.approx((0.3, 0.3)), pytest.approx((0, 0), abs=1e-6), pytest.approx((0, 0), abs=1e-6)]


def test_the_bubble_is_reported_only_with_enough_forwards_and_memory_stays_bounded():
    timeline = StepTimeline(1)
    timeline.add_forwards([one(0, 1)])
    assert "timeline/bubble" not in timeline.close(ORIGIN_S + 2, step_s=2.0)
    found = decode(ORIGIN_S + 2, np.full(80, 3 * FITTED_PER_STEP))
    ended_s = float(found["started_at_s"][-1] + found["seconds"][-1])
    timeline.add_forwards([found])
    metrics = timeline.close(ended_s, step_s=1.0)
    assert 0 < metrics["timeline/underfilled_share"] < metrics["timeline/bubble"] < 1
    assert len(timeline._evidence) <= FITTED_PER_STEP + 1
    assert len(timeline._forwards[0]) <= 2 and timeline._spans == []


def test_evidence_of_many_engines_is_spread_evenly_over_all_their_forwards():
    """Each engine is full at its begin and empty at its end; the reference thins one array of all forwards."""
    engines = [np.zeros(length, dtype=FORWARD) for length in (0, 7, 2 * FITTED_PER_STEP, 1, 3 * FITTED_PER_STEP + 5)]
    for number, forwards in enumerate(engines):
        forwards["num_context_tokens"] = 100_000 * number + np.arange(len(forwards))
    timeline = StepTimeline(len(engines))
    timeline.add_forwards(engines)
    together = np.concatenate(engines)
    wanted = together[:: -(-len(together) // FITTED_PER_STEP)]
    assert np.array_equal(timeline._evidence, wanted) and len(wanted) <= FITTED_PER_STEP


def test_a_clock_that_was_set_back_only_loses_the_metrics_of_a_step():
    timeline = StepTimeline(1)
    timeline.add_forwards([none()])
    assert timeline.close(ORIGIN_S + 10, step_s=5.0)
    assert timeline.close(ORIGIN_S + 4, step_s=5.0) == {}
    assert timeline.close(ORIGIN_S + 6, step_s=5.0)["timeline/elapsed_s"] == pytest.approx(2)


def test_the_next_row_has_the_seconds_of_evaluation_and_checkpoint():
    timeline = StepTimeline(1)
    timeline.add_span("engines", "evaluate", ORIGIN_S, ORIGIN_S + 2)
    first = timeline.close(ORIGIN_S + 10, step_s=8.0)
    timeline.add_span("engines", "evaluate", ORIGIN_S + 10, ORIGIN_S + 11)
    timeline.add_span("trainer", "checkpoint", ORIGIN_S + 11, ORIGIN_S + 14)
    second = timeline.close(ORIGIN_S + 20, step_s=6.0)
    third = timeline.close(ORIGIN_S + 30, step_s=10.0)
    names = ("timing_s/evaluate_before_step", "timing_s/checkpoint_before_step")
    assert [[row.get(name) for name in names] for row in (first, second, third)] == [
        [pytest.approx(2), None],
        [pytest.approx(1), pytest.approx(3)],
        [None, None],
    ]


SAVE = (("trainer", "switch", 8), ("trainer", "checkpoint", 12), ("engines", "switch", 5), ("publisher", "publish", 25))
TRAIN = (("trainer", "switch", 4), ("trainer", "train", 30), ("engines", "switch", 2), ("publisher", "publish", 24))


def add_spans(timeline: StepTimeline, start_s: float, *phases: tuple[str, str, float]) -> float:
    """Add phases, one after another; returns the end of the last one, in seconds since `ORIGIN_S`."""
    for actor, activity, seconds in phases:
        timeline.add_span(actor, activity, ORIGIN_S + start_s, ORIGIN_S + start_s + seconds)
        start_s += seconds
    return start_s


def test_the_seconds_of_a_save_that_let_the_engines_sleep_are_in_the_next_row_and_those_of_steps_in_their_own():
    """Colocated with sleep; the third step was sampled ahead. The first row has what came before the first step."""
    timeline = StepTimeline(1)
    found = []
    now_s = add_spans(timeline, 0, ("engines", "switch", 3), ("publisher", "publish", 20), ("engines", "evaluate", 50))
    for rollout_s in (100, 80, 0.01):
        began_s = now_s
        now_s = add_spans(timeline, now_s, ("engines", "rollout", rollout_s), *TRAIN)
        row = timeline.close(ORIGIN_S + now_s, step_s=now_s - began_s)
        before = {name: value for name, value in row.items() if name.endswith("_before_step")}
        if found:  # all time since the row before is in the step, or in one of these
            assert row["timeline/elapsed_s"] == pytest.approx(now_s - began_s + sum(before.values()))
        found.append(before)
        now_s = add_spans(timeline, now_s, *SAVE)
    between = {"checkpoint": 12, "publish": 25, "switch": 13}
    for before, wanted in zip(found, ({"evaluate": 50, "publish": 20, "switch": 3}, between, between), strict=True):
        assert before == {f"timing_s/{name}_before_step": pytest.approx(value) for name, value in wanted.items()}


def test_a_publish_to_engines_that_were_restarted_in_an_evaluation_is_a_part_of_it():
    timeline = StepTimeline(1)
    timeline.add_span("publisher", "publish", ORIGIN_S + 3, ORIGIN_S + 5)
    timeline.add_span("engines", "evaluate", ORIGIN_S, ORIGIN_S + 10)
    row = timeline.close(ORIGIN_S + 20, step_s=10.0)
    assert row["timing_s/evaluate_before_step"] == pytest.approx(10)
    assert "timing_s/publish_before_step" not in row


def test_a_publish_just_before_a_step_is_counted_though_the_wall_clock_is_late():
    """The wall clock lost 2 s in a step of 100 s by the other clock, so the step seems to begin within the publish."""
    timeline = StepTimeline(1)
    timeline.add_span("publisher", "publish", ORIGIN_S, ORIGIN_S + 20)
    assert timeline.close(ORIGIN_S + 118, step_s=100.0)["timing_s/publish_before_step"] == pytest.approx(18)


@pytest.mark.parametrize("set_by_s", [-0.5, 150.0])
def test_no_phase_of_a_step_is_taken_for_one_before_it_when_the_clock_is_set(set_by_s: float) -> None:
    """Back in the publish, which ends behind its row; forward in the rollout, so that the step seems to begin late."""
    timeline = StepTimeline(1)
    now_s = add_spans(timeline, 0, ("engines", "rollout", 100), ("trainer", "switch", 4), ("trainer", "train", 30))
    now_s = add_spans(timeline, now_s, ("publisher", "publish", 24))
    rows = [timeline.close(ORIGIN_S + now_s + min(set_by_s, 0), step_s=158)]
    now_s += set_by_s
    now_s = add_spans(timeline, now_s, ("engines", "rollout", 100), ("trainer", "switch", 4), ("trainer", "train", 30))
    rows.append(timeline.close(ORIGIN_S + now_s, step_s=134 if set_by_s < 0 else 20))
    assert [name for row in rows for name in row if name.endswith("_before_step")] == []


def test_after_the_loss_of_a_trainer_the_next_row_is_that_of_a_start() -> None:
    """The outage of 2,000 s and what the lost trainer had begun are in no step."""
    timeline = StepTimeline(1)
    now_s = add_spans(timeline, 0, ("engines", "rollout", 100), *TRAIN)
    timeline.close(ORIGIN_S + now_s, step_s=160)
    now_s = add_spans(timeline, now_s, *SAVE, ("engines", "rollout", 100), ("trainer", "switch", 4))
    timeline.begin_anew()
    began_s = add_spans(timeline, now_s + 2000, ("publisher", "publish", 20))
    now_s = add_spans(timeline, began_s, ("engines", "rollout", 100), *TRAIN)
    row = timeline.close(ORIGIN_S + now_s, step_s=now_s - began_s)
    assert row["timeline/elapsed_s"] == pytest.approx(160)
    before = {name: value for name, value in row.items() if name.endswith("_before_step")}
    assert before == {"timing_s/publish_before_step": pytest.approx(20)}
