"""What a run does on the guard's word: lines, metrics, settings, other engines."""

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


def test_a_level_beyond_a_shorter_ladder_is_its_last_one():
    assert guard(state=GuardState(level=4), actions=LADDER[:1]).state.level == 1


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
