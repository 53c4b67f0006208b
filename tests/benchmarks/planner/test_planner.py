"""The simulator against a naive one that runs forward by forward, and the benchmark's bounds."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner.schedules import SCHEMES, Case, replays, run, workload_of
from benchmarks.planner.simulator.bounds import longest_s, saturated_s
from benchmarks.planner.simulator.engines import REACHED, Engines, Speed
from benchmarks.planner.simulator.run import simulate
from benchmarks.planner.simulator.scheme import Cluster, Scheme
from benchmarks.planner.simulator.speeds import inferred, measured
from benchmarks.planner.simulator.workload import Workload, draw, replayed, single_responses
from history.store.traces import Trace, write_traces


def naive_ends(lengths, *, num_slots, speed: Speed, pause=(np.inf, 0.0)):
    """Ends in seconds of responses that one engine runs in order, forward by forward."""
    clock, waiting, running, ends = 0.0, list(range(len(lengths))), {}, {}
    gained = dict.fromkeys(waiting, 0.0)
    while waiting or running:
        if clock >= pause[0]:
            clock, pause = max(clock, pause[1]), (np.inf, 0.0)
        while waiting and len(running) < num_slots:
            running[waiting.pop(0)] = True
        rows = len(running)
        clock += speed.fixed_s[rows] + speed.context_s * sum(gained[r] for r in running)
        for response in list(running):
            gained[response] += speed.gains[rows]
            if gained[response] >= lengths[response] - 1e-9:
                ends[response] = clock
                del running[response]
    return [ends[r] for r in range(len(lengths))]


def engine_of(lengths, speed, num_slots) -> Engines:
    groups = np.arange(len(lengths))
    return Engines(
        num_engines=1,
        num_slots=num_slots,
        speed=speed,
        lengths=np.asarray(lengths, dtype=np.float64),
        groups=groups,
        waiting_capacity=len(lengths),
    )


@pytest.mark.slow
@pytest.mark.parametrize("gain", [1.0, 2.5])
@pytest.mark.parametrize("pause", [(np.inf, 0.0), (0.7, 3.0)])
def test_responses_end_at_the_times_of_a_naive_simulation(gain, pause):
    lengths = np.random.default_rng(0).integers(1, 120, 40).astype(float)
    rows = np.arange(9)
    speed = Speed(fixed_s=0.01 + 0.001 * rows, context_s=2e-5, gains=np.where(rows > 4, gain, 1.2 * gain))
    engine = engine_of(lengths, speed, 8)
    engine.give(0, np.arange(40), at_s=0.0)
    while (engine.run(pause[0]))[0] != REACHED:
        pass
    if np.isfinite(pause[0]):
        engine.pause(0, *pause)
        while engine.run(1e9)[0] != REACHED:
            pass
    expected = naive_ends(lengths, num_slots=8, speed=speed, pause=pause)
    # context grows by whole tokens in one simulation and by tokens per forward in the other
    np.testing.assert_allclose(engine.ended_s, expected, rtol=0.004 if gain == 1.0 else 0.02)


def test_migrated_responses_end_when_the_new_engine_has_computed_the_rest():
    """Two responses run on engine 0; after a second the longer one resumes alone on engine 1."""
    lengths = np.array([300.0, 100.0])
    speed = Speed(fixed_s=0.01 + 0.001 * np.arange(9), context_s=2e-5, gains=np.ones(9))
    engines = Engines(num_engines=2, num_slots=8, speed=speed, lengths=lengths, groups=np.arange(2), waiting_capacity=4)
    engines.give(0, np.arange(2), at_s=0.0)
    assert engines.run(1.0)[0] == REACHED
    ids, had = engines.running(0, at_s=1.0)
    assert ids.tolist() == [0, 1] and had[0] == had[1]
    engines.take_away(0, np.array([0]), at_s=1.0)
    engines.give(1, np.array([0]), at_s=2.0)
    while engines.run(1e9)[0] != REACHED:
        pass

    def rest_s(length, begins_at):
        clock, tokens = begins_at, had[0]
        while tokens < length:
            clock += speed.fixed_s[1] + speed.context_s * tokens
            tokens += 1
        return clock

    together = 0.0
    for tokens in range(int(had[0])):
        together += speed.fixed_s[2] + speed.context_s * 2 * tokens
    assert 1.0 <= together < 1.0 + speed.fixed_s[2] + speed.context_s * 2 * had[0]
    assert engines.ended_s[0] == pytest.approx(rest_s(300, 2.0), rel=1e-9)
    assert engines.ended_s[1] == pytest.approx(rest_s(100, together), rel=1e-9)
    assert engines.started_s.tolist() == [0.0, 0.0]
    assert engines.free_slots(0) == engines.free_slots(1) == 8


def test_migration_to_idle_engines_shortens_a_step_with_a_long_last_response():
    workload = workload_of(Case(scheme="lpt", num_engines=4, num_steps=6))
    cluster = Cluster(num_engines=4, num_slots=64, speed=inferred(64), train_s_per_token=1e-6)
    stay, move = (simulate(workload, cluster, Scheme(policy="adaptive", migration=on)) for on in (False, True))
    assert stay.num_moved == 0 < move.num_moved
    assert move.step_s < stay.step_s and move.idle < stay.idle
    np.testing.assert_array_equal(move.consumed_lengths, stay.consumed_lengths)


def test_an_engine_leaves_the_groups_of_others_that_start_where_they_were_placed():
    """With slots for the whole step, the engine of the long group starts nothing else, as in the product's pool."""
    lengths = np.array([[1000.0], *[[100.0]] * 5])
    workload = Workload(lengths=lengths, forecasts=lengths[:, 0], groups_per_step=6)
    cluster = Cluster(num_engines=2, num_slots=8, speed=inferred(8))
    assert simulate(workload, cluster, Scheme(policy="adaptive")).num_stolen == 0
    few = replace(cluster, num_slots=3, speed=inferred(3))
    assert simulate(workload, few, Scheme(policy="adaptive")).num_stolen == 2


def test_a_trainer_with_given_times_uses_them():
    workload = workload_of(Case(scheme="lpt", num_engines=4, num_steps=3))
    at_once = Cluster(num_engines=4, num_slots=64, speed=inferred(64), train_s=(0.0, 0.0, 0.0))
    slow = Cluster(num_engines=4, num_slots=64, speed=inferred(64), train_s=(7.0, 0.0, 20.0))
    waits = [simulate(workload, cluster, Scheme(policy="lpt")).step_s * 3 for cluster in (at_once, slow)]
    assert waits[1] - waits[0] == pytest.approx(27.0)


def test_full_engines_need_the_time_of_the_bound_and_never_less():
    lengths = np.full(64 * 8, 2000.0)
    speed = inferred(64)
    engine = engine_of(lengths, speed, 64)
    engine.give(0, np.arange(len(lengths)), at_s=0.0)
    while engine.run(1e9)[0] != REACHED:
        pass
    bound = saturated_s(lengths, fixed_s=speed.fixed_s, context_s=speed.context_s, gains=speed.gains, num_engines=1)
    assert bound <= engine.ended_s.max() < 1.001 * bound


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_trains_on_all_drawn_groups_and_is_no_faster_than_the_bound(name):
    case = Case(scheme=name, num_engines=4, num_steps=6)
    row = run(case)
    assert row["max_staleness"] <= SCHEMES[name].max_staleness
    assert row["step_s"] > row["saturated_step_s"]
    assert 0 < row["bubble"] < 1 and 0 <= row["idle"] <= row["bubble"]
    workload = workload_of(case)
    cluster = Cluster(num_engines=4, num_slots=64, speed=inferred(64), train_s_per_token=1e-6)
    consumed = simulate(workload, cluster, SCHEMES[name]).consumed_lengths
    np.testing.assert_array_equal(consumed, np.sort(workload.lengths.ravel()))


def test_training_takes_as_long_with_drafts_as_without() -> None:
    few = Case(scheme="static", num_engines=4, num_steps=3)
    plain, drafted = run(few), run(replace(few, drafter="ours"))
    # a synchronous step is its rollout, a training of half of the saturated rollout without drafts, and a publish
    training_s = plain["saturated_step_s"] / 2
    assert drafted["step_s"] > training_s + drafted["saturated_step_s"]
    assert drafted["saturated_step_s"] < plain["saturated_step_s"] / 2


def test_overlap_is_faster_and_the_longest_response_bounds_a_synchronous_step():
    workload = workload_of(Case(scheme="lpt", num_engines=4, num_steps=8))
    speed = inferred(64)
    cluster = Cluster(num_engines=4, num_slots=64, speed=speed, train_s_per_token=1e-6)
    plain = simulate(workload, cluster, Scheme(policy="adaptive"))
    ahead = simulate(workload, cluster, Scheme(policy="adaptive", overlap=1, max_staleness=1))
    assert ahead.step_s < 0.8 * plain.step_s
    steps = workload.lengths.reshape(workload.num_steps, -1)
    alone = [
        longest_s(s, fixed_s=speed.fixed_s, context_s=speed.context_s, gains=speed.gains, max_staleness=0)
        for s in steps
    ]
    assert plain.step_s > np.mean(alone)


def test_forecasts_have_the_requested_quality():
    known = draw(1, num_steps=1, groups_per_step=20_000, group_size=1, prompt_share=1.0, prompt_correlation=0.9)
    found = np.corrcoef(np.log(known.forecasts), np.log(known.lengths[:, 0]))[0, 1]
    assert found == pytest.approx(0.9, abs=0.02)
    grouped = draw(1, num_steps=1, groups_per_step=4000, group_size=8, prompt_share=0.6, prompt_correlation=0.95)
    singles = single_responses(grouped)
    found = np.corrcoef(np.log(singles.forecasts), np.log(singles.lengths[:, 0]))[0, 1]
    assert found == pytest.approx(0.95 * 0.6**0.5, abs=0.02)
    assert singles.groups_per_step == 32_000


def test_recorded_drafts_make_engines_faster():
    plain, ours, paper = (inferred(64, drafter) for drafter in ("none", "ours", "histospec"))
    for rows in (1, 16, 64):
        speeds = [rows * speed.gains[rows] / speed.fixed_s[rows] for speed in (plain, paper, ours)]
        assert speeds == sorted(speeds)


def recorded(num_steps=6, num_prompts=6, group_size=4):
    generator = np.random.default_rng(0)
    own = generator.lognormal(4, 0.8, num_prompts)
    return [
        Trace(
            step=step,
            prompt_id=f"t/{prompt}",
            sample=sample,
            prompt_ids=np.array([1], dtype=np.int32),
            response_ids=np.zeros(int(own[prompt] * generator.lognormal(0, 0.1)) + 1, dtype=np.int32),
            reward=0.0,
        )
        for step in range(num_steps)
        for prompt in range(num_prompts)
        for sample in range(group_size)
    ]


def test_recorded_responses_are_replayed_with_the_forecasts_of_a_run(tmp_path):
    traces = recorded()
    found = replayed(traces)
    assert found.lengths.shape == (36, 4) and found.num_steps == 6
    assert len(set(found.forecasts[:6])) == 1  # nothing is known before the first visit
    later = np.corrcoef(found.forecasts[6:], found.lengths[6:].mean(axis=1))[0, 1]
    assert later > 0.95
    path = tmp_path / "step-0.jsonl"
    write_traces(path, traces)
    rows = {row["scheme"]: row for row in replays([path], inferred(4), num_engines=2, num_slots=4, train_share=0.5)}
    assert rows["adaptive, overlap 1"]["step_s"] < rows["static"]["step_s"]
    with pytest.raises(ValueError, match="no traces"):
        replayed([])


def test_a_prompt_that_a_step_has_twice_is_replayed_as_two_groups():
    """An epoch that ends amid a step can bring it a prompt again."""
    traces = recorded(num_steps=2)
    again = [replace(trace, prompt_id="t/0") if trace.prompt_id == "t/5" and trace.step else trace for trace in traces]
    found = replayed(again)
    assert found.num_steps == 2
    np.testing.assert_array_equal(found.lengths, replayed(traces).lengths)
    assert found.forecasts[6] == found.forecasts[11]


def test_speeds_are_read_from_a_record_of_step_times(tmp_path):
    rows = [
        {
            "num_rows": b,
            "num_tokens": b,
            "num_context_tokens": b * c,
            "seconds": 0.01 + 1e-4 * b + 1e-8 * b * c,
            "m": "x",
        }
        for b in (1, 2, 4, 8, 16, 32, 64)
        for c in (0, 1024, 4096)
    ]
    path = tmp_path / "step_time.json"
    path.write_text(json.dumps({"rows": rows}))
    speed = measured(path, 64, only={"m": "x"})
    assert speed.fixed_s[1] == pytest.approx(0.0101, rel=0.1)
    assert speed.fixed_s[64] == pytest.approx(0.0164, rel=0.1)
    assert speed.context_s == pytest.approx(1e-8, rel=0.3)
    with pytest.raises(ValueError, match="no row with"):
        measured(path, 64, only={"m": "y"})
