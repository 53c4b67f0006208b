"""What a run does on the guard's word: lines, metrics, settings, other engines."""

import json
from dataclasses import replace

import pytest

from megatron_rl.algorithm.guard import Action, GuardState, InForce
from megatron_rl.controller.guarding import Guard
from megatron_rl.controller.stopping import EngineFormatError
from megatron_rl.guard_config import GuardConfig
from megatron_rl.trainer.messages import StepResult
from megatron_rl.weights.quantization_stats import QuantizationStats
from tests.megatron_rl.controller.test_controller import Log, controller, publish_report

LADDER = (
    Action(kind="cap", value=1.5),
    Action(kind="bf16_layers", value=2),
    Action(kind="overlap", value=0),
    Action(kind="bf16_rollouts", value=1),
)
BAD = {
    "rollout_corr/k3_kl": 0.06,
    "rollout_corr/ratio_eff_sample_size": 0.9,
    "rollout_corr/abs_log_ratio_p999": 1.5,
}
HEALTHY = dict.fromkeys(BAD, 1e-4) | {"rollout_corr/ratio_eff_sample_size": 0.9999}
CODES = {layer: QuantizationStats(signal=10.0**layer, noise=0.1, num_codes=9) for layer in (3, 1, 2, 0)}
REPORT = replace(publish_report(), codes=CODES)


def guard(mode="act", state=None, actions=LADDER, lines=None):
    config = GuardConfig(mode=mode, patience=1, recover_after=2)
    report = (lambda line: None) if lines is None else lines.append
    return Guard(config, actions, state or GuardState(), report=report)


def test_levels_put_their_settings_in_force_and_each_action_is_one_line():
    lines: list[str] = []
    one = guard(lines=lines)
    expected = [
        InForce(cap=1.5),
        InForce(cap=1.5, layers=(0, 1)),  # the lowest SQNR
        InForce(cap=1.5, layers=(0, 1), overlap=0),
        InForce(cap=1.5, layers=(0, 1), overlap=0, bf16_rollouts=True),
    ]
    for step, settings in enumerate(expected):
        metrics = one.after_step(step, BAD, REPORT)
        assert one.in_force == settings
        assert metrics == {"guard/level": step + 1.0, "guard/actions": step + 1.0, "guard/bad_steps": 0.0}
    assert one.after_step(4, BAD, REPORT)["guard/level"] == 4
    for step in (5, 6):
        one.after_step(step, HEALTHY, REPORT)
    assert one.in_force == expected[2]
    assert lines[0].startswith(
        "step 1, level 1 of 4: set correction.cap = 1.5; ESS 0.9000 (at least 0.95), k3 6.00e-02"
    )
    assert "set 2 layer(s) with the worst SQNR in BF16: 0, 1" in lines[1]
    assert lines[4].startswith("step 7, level 3 of 4: take back engine.format = engine.kv_format = bf16")
    assert len(lines) == 5


def test_only_another_format_needs_other_engines_and_a_resumed_level_has_them_already():
    one = guard()
    needed = []
    for step in range(4):
        one.after_step(step, BAD, REPORT)
        needed.append(one.needs_other_engines)
    assert needed == [False, True, True, True]
    assert not guard(state=one.state).needs_other_engines
    assert guard(state=one.state).in_force == one.in_force


def test_advice_changes_no_setting():
    lines: list[str] = []
    one = guard("advise", lines=lines)
    levels = [one.after_step(step, BAD, REPORT)["guard/level"] for step in range(5)]
    assert levels == [1, 2, 3, 4, 4] and len(lines) == 4
    assert one.in_force == InForce() and not one.needs_other_engines
    assert "advise correction.cap = 1.5" in lines[0]


def test_a_run_that_acts_after_advice_begins_at_level_0_and_advice_goes_on_from_advice():
    advising = guard("advise")
    advising.after_step(0, BAD, REPORT)
    assert guard("advise", state=advising.state).state == advising.state
    assert guard("act", state=advising.state).state == GuardState()
    acting = guard("act")
    acting.after_step(0, BAD, REPORT)
    assert guard("advise", state=acting.state).state.level == 0


def test_a_level_of_an_earlier_version_beyond_a_shorter_ladder_is_its_last_one():
    lines: list[str] = []
    assert guard(state=GuardState(level=4), actions=LADDER[:1], lines=lines).state.level == 1
    assert lines == ["the actions of this run have changed: level 1 of 1 instead of 4"]
    same = guard(state=GuardState(level=2), lines=lines).state  # which says nothing
    assert len(lines) == 1 and same.actions == LADDER[:2]


def test_another_ladder_goes_on_at_the_level_of_its_common_beginning_and_says_so():
    first, lines = guard(), []
    for step in range(3):
        first.after_step(step, BAD, REPORT)
    saved = GuardState.from_json(json.loads(json.dumps(first.state.to_json())))
    tighter = (LADDER[0], replace(LADDER[1], value=1), *LADDER[2:])
    for actions, level, settings in (
        (LADDER, 3, first.in_force),
        (tighter, 1, InForce(cap=1.5)),
        (LADDER[1:], 0, InForce()),  # the cap is configured now
        (LADDER[:2], 2, InForce(cap=1.5, layers=(0, 1))),
        ((), 0, InForce()),
    ):
        lines.clear()
        one = guard(state=replace(saved, bad=3), actions=actions, lines=lines)
        assert (one.state.level, one.in_force, one.needs_other_engines) == (level, settings, False)
        assert one.state.bad == (3 if level == 3 else 0)
        lost = "; ".join(action.line for action in LADDER[level:3])
        assert (
            lines == []
            if level == 3
            else lines
            == [
                f"the actions of this run have changed: level {level} of {len(actions)} instead of 3; "
                f"no longer in force: {lost}"
            ]
        )
        assert one.after_step(3, {}, REPORT)["guard/level"] == level
    one = guard(state=saved, actions=LADDER[1:], lines=lines)
    one.after_step(3, BAD, REPORT)
    assert lines[-1].startswith("step 4, level 1 of 3: set 2 layer(s) with the worst SQNR in BF16: 0, 1; ")
    assert not guard(state=one.state, actions=LADDER[1:]).needs_other_engines
    assert guard(state=one.state, actions=LADDER).state.level == 0


def test_advice_of_another_ladder_begins_anew_too():
    advising, lines = guard("advise"), []
    advising.after_step(0, BAD, REPORT)
    assert guard("advise", state=advising.state, actions=LADDER[1:], lines=lines).state.level == 0
    assert lines == [
        "the actions of this run have changed: level 0 of 3 instead of 1; no longer advised: correction.cap = 1.5"
    ]


def test_the_next_batch_has_the_cap_and_the_planner_the_overlap():
    log, batches, overlaps = Log(), [], []
    run = controller(log, num_steps=3)
    run.trainer.train = lambda batch: (
        batches.append(batch) or StepResult(metrics=BAD, num_optimizer_steps=1, num_skipped_updates=0)
    )
    run.planner.limit_overlap = overlaps.append
    run.guard = guard(actions=(LADDER[0], LADDER[2]))
    run.run()
    assert [batch.cap for batch in batches] == [None, 1.5, 1.5]
    assert [batch.of_rank(0).cap for batch in batches] == [None, 1.5, 1.5]
    assert overlaps == [None, 0, 0]


def test_other_engines_are_asked_for_after_a_save_and_never_after_the_last_step():
    for num_steps in (3, 1):
        log, saved = Log(), []
        run = controller(log, num_steps=num_steps)
        run.trainer.train = lambda batch: StepResult(metrics=BAD, num_optimizer_steps=1, num_skipped_updates=0)
        run.planner.limit_overlap = lambda most: None
        run.recorder.save = lambda step, trainer, planner, state, saved=saved: saved.append((step, state.level))
        run.guard = guard(actions=(LADDER[3],))
        if num_steps == 1:
            run.run()
        else:
            with pytest.raises(EngineFormatError, match="after step 1"):
                run.run()
            assert log[-1] == "finish save"
        assert saved == [(1, 1)]
