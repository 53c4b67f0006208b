"""Steps on paper: speeds follow the roofline, every stack trains the same work, published figures are read right."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.at_scale import published, stacks
from benchmarks.at_scale.__main__ import JUDGED, cases, goals
from benchmarks.at_scale.jobs import MODELS, job
from benchmarks.at_scale.stacks import APART, BOTH, RHYME, STACKS, SYNCHRONOUS, Case, run, workload_of
from benchmarks.harness.record import Row
from launcher.estimate.rollout_time import forward_s
from launcher.estimate.train_time import train_estimate
from launcher.first_hour.shares import Shares

FEW = Case(model="Qwen2.5-32B", num_gpus=128, stack=SYNCHRONOUS, arrangement="colocated", num_steps=1)


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    return workload_of(FEW).lengths


@pytest.mark.parametrize("model", MODELS)
def test_a_forward_costs_what_the_roofline_says(model: str, lengths: np.ndarray) -> None:
    planned = job(model, 128, "BF16", lengths)
    speed, context = planned.speed("none"), 4000.0
    assert len(speed.fixed_s) == planned.num_slots + 1 and set(speed.gains) == {1.0}
    for rows in (1, planned.num_slots):
        expected, bound = forward_s(planned.run, planned.given, rows, context)
        found = float(speed.fixed_s[rows]) + speed.context_s * rows * (context - 512)
        assert bound == "memory" and found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_eight_bits_leave_room_for_more_responses_and_shorten_forwards(model: str, lengths: np.ndarray) -> None:
    wide, narrow = (job(model, 128, precision, lengths) for precision in ("BF16", "8 bits"))
    assert narrow.num_slots > wide.num_slots
    assert narrow.speed("none").fixed_s[1] < wide.speed("none").fixed_s[1]
    assert narrow.train_s == wide.train_s


def test_drafts_are_left_out_where_they_do_not_pay(lengths: np.ndarray) -> None:
    planned = job("Qwen3-30B-A3B", 128, "8 bits", lengths)
    plain, drafted = planned.speed("none"), planned.speed("ours")
    assert np.all(drafted.gains / drafted.fixed_s >= plain.gains / plain.fixed_s - 1e-12)
    assert drafted.gains[1] > 2


def test_training_takes_the_same_time_on_all_gpus_whatever_the_stack() -> None:
    rows = [run(replace(FEW, num_steps=2)), run(replace(FEW, stack=RHYME, arrangement="disaggregated", num_steps=2))]
    assert [row["arrangement"] for row in rows] == ["colocated", "disaggregated"]
    assert rows[0]["train_all_gpus_s"] == rows[1]["train_all_gpus_s"] == rows[0]["train_s"]
    assert rows[1]["train_s"] == pytest.approx(rows[0]["train_s"] * 128 / rows[1]["trainer_gpus"], rel=0.01)


def test_a_synchronous_step_is_its_rollout_its_training_and_a_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one length, all of which an engine samples at once: every forward has the same rows."""
    tokens = 100.0
    drawn = workload_of(FEW)
    alike = replace(drawn, lengths=np.full_like(drawn.lengths, tokens), forecasts=np.full_like(drawn.forecasts, tokens))
    monkeypatch.setattr(stacks, "workload_of", lambda case: alike)
    row = run(FEW)
    planned = job(FEW.model, FEW.num_gpus, "BF16", alike.lengths)
    speed, rows = planned.speed("none"), alike.lengths.size // planned.run.config.engine.num_engines
    assert rows <= planned.num_slots and row["max_staleness"] == 0 and row["bound_by"] == "both in turns"
    rollout_s = tokens * speed.fixed_s[rows] + speed.context_s * rows * tokens * (tokens - 1) / 2
    expected = rollout_s + planned.train_s + planned.publish_s(in_turns=True)
    assert row["step_s"] == pytest.approx(expected, abs=0.1)


def test_each_published_step_is_estimated_on_the_published_cluster() -> None:
    rows = list(published.rows())
    assert len(rows) == len(published.PUBLISHED) + 1
    for each, row in zip(published.PUBLISHED, rows, strict=False):
        assert row["published"] == each.seconds
        assert row["estimated_over_published"] == pytest.approx(float(row["estimated"]) / each.seconds, abs=0.01)
        assert 0.3 < row["estimated_over_published"] < 3
    assert rows[1]["estimated"] == pytest.approx(max(rows[1]["rollout_s"], rows[1]["train_s"]), abs=0.1)


def judged(steps: dict[tuple[str, str], float]) -> list[Row]:
    """Rows of all stacks, with 700 seconds a step unless `steps` has others."""
    model, num_gpus = JUDGED
    same = {"what": "stack", "model": model, "gpus": num_gpus, "train_all_gpus_s": 200.0}
    rows: list[Row] = [
        {**same, "stack": name, "arrangement": arrangement, "step_s": steps.get((name, arrangement), 700.0)}
        for name, stack in STACKS.items()
        for arrangement in stack.arrangements
    ]
    return [*rows, {"what": "published", "estimated_over_published": 0.9}]


def test_goals_take_the_best_stack_that_is_at_most_one_step_stale() -> None:
    steps = {
        (SYNCHRONOUS, "colocated"): 1000.0,
        (SYNCHRONOUS, "disaggregated"): 1500.0,
        (RHYME, "colocated"): 650.0,
        (RHYME, "disaggregated"): 600.0,
        ("ours, overlap 1, BF16, drafts", "colocated"): 500.0,
        ("ours, overlap 1, 8 bits, drafts", "disaggregated"): 400.0,
        ("ours, overlap 2, 8 bits, drafts", "colocated"): 100.0,
    }
    assert [goal.value for goal in goals(judged(steps))] == pytest.approx([2.5, 1.2, 1.5, 0.5, 0.1])


def test_a_goal_over_another_system_has_equal_precision_and_arrangements_or_names_the_difference() -> None:
    """Each stack is made faster in turn: the goal that moves must name its precision if the other system has BF16."""
    before = {goal.name: goal.value for goal in goals(judged({}))}
    over = [name for name in before if name.startswith(("over", "ours"))]
    assert len(over) == 3
    for name, stack in STACKS.items():
        if not name.startswith("ours") or stack.scheme.max_staleness > 1:
            continue
        assert stack.arrangements == STACKS[RHYME].arrangements == STACKS[SYNCHRONOUS].arrangements == BOTH
        for arrangement in stack.arrangements:
            after = {goal.name: goal.value for goal in goals(judged({(name, arrangement): 350.0}))}
            moved = [goal for goal in over if after[goal] != before[goal]]
            assert moved and all(stack.precision in goal for goal in moved)
    assert {stack.precision for stack in (STACKS[RHYME], STACKS[SYNCHRONOUS])} == {"BF16"}


def test_every_stack_is_simulated_in_each_arrangement_that_its_design_allows() -> None:
    found = [(case.stack, case.arrangement) for case in cases(quick=True)]
    assert found == [(name, arrangement) for name, stack in STACKS.items() for arrangement in stack.arrangements]
    assert {name for name, stack in STACKS.items() if stack.arrangements == APART} == {
        "one step off (NeMo-RL, verl)",
        "asynchronous, first in first out (AReaL)",
    }
    assert set(found) == {(case.stack, case.arrangement) for case in cases(quick=False)}


def test_measured_shares_of_peaks_replace_the_assumed_ones(lengths: np.ndarray) -> None:
    assumed = job("Qwen2.5-32B", 128, "BF16", lengths)
    reached = Shares(
        gpu="h100",
        product_share=0.2,
        eight_bit_product_share=None,
        bandwidth_share=0.35,
        host_share=0.5,
        forward_overhead_s=0.0,
    )
    found = job("Qwen2.5-32B", 128, "BF16", lengths, reached)
    train, halved = (train_estimate(each.run, each.given) for each in (assumed, found))
    assert halved.products_s == pytest.approx(2 * train.products_s)
    without = replace(assumed.given, forward_overhead_s=0.0, all_reduce_latency_s=0.0)
    one, _ = forward_s(assumed.run, without, 1, 512.0)
    two, _ = forward_s(found.run, replace(found.given, all_reduce_latency_s=0.0), 1, 512.0)
    assert two == pytest.approx(2 * one)
    steps = [list(published.rows(each)) for each in (None, reached)]
    assert all(slow["estimated"] > fast["estimated"] for fast, slow in zip(*(each[:3] for each in steps), strict=True))
