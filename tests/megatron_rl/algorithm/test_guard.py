"""The guard's decisions over series of steps."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.guard import (
    MOST_HOLD,
    Action,
    GuardState,
    Observation,
    advance,
    check_actions,
    ladder,
    verdict,
    worst_layers,
)
from megatron_rl.guard_config import GuardConfig

RULES = GuardConfig(mode="act", patience=3, recover_after=6)
SEEN = {
    "healthy": Observation(ess=0.999, k3=2e-4, tail=0.1),
    "doubtful": Observation(ess=0.999, k3=4e-3, tail=0.1),
    "bad": Observation(ess=0.8, k3=0.06, tail=2.0),
}


def levels_of(verdicts, rules=RULES, *, num_actions=4, state=None):
    """Level before the first step and after each step."""
    state = state or GuardState()
    levels = [state.level]
    for name in verdicts:
        state = advance(state, SEEN[name], rules, num_actions=num_actions)
        levels.append(state.level)
    return levels, state


@pytest.mark.parametrize("field", ["ess", "k3", "tail"])
def test_one_value_beyond_its_bound_makes_a_step_bad_and_one_near_it_makes_it_doubtful(field):
    bounds = {"ess": RULES.min_ess, "k3": RULES.max_k3, "tail": RULES.max_tail}
    perfect = {"ess": 1.0, "k3": 0.0, "tail": 0.0}
    for share, expected in ((0.0, "healthy"), (0.49, "healthy"), (0.51, "doubtful"), (0.99, "doubtful"), (1.01, "bad")):
        value = perfect[field] + share * (bounds[field] - perfect[field])
        assert verdict(Observation(**{**perfect, field: value}), RULES) == expected, (field, share)
    assert verdict(Observation(**{**perfect, field: float("nan")}), RULES) == "bad"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(SEEN)), max_size=120),
    st.integers(1, 6),
    st.integers(0, 12),
    st.integers(0, 5),
)
def test_no_series_makes_the_guard_flap(verdicts, patience, more, num_actions):
    rules = GuardConfig(mode="act", patience=patience, recover_after=patience + more)
    levels, _ = levels_of(verdicts, rules, num_actions=num_actions)
    check_actions(levels, verdicts, rules, num_actions=num_actions)


def test_a_healthy_run_of_200_steps_never_acts_even_with_single_bad_steps():
    assert set(levels_of(["healthy"] * 200)[0]) == {0}
    assert set(levels_of(["healthy", "healthy", "bad", "bad", "doubtful"] * 40)[0]) == {0}


def test_a_bad_run_climbs_one_level_every_patience_steps_to_the_end_of_the_ladder():
    levels, state = levels_of(["bad"] * 20)
    assert levels[1:] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4] + [4] * 8
    assert state.num_actions == 4


def test_a_recovered_run_returns_one_level_at_a_time():
    levels, state = levels_of(["bad"] * 6 + ["healthy"] * 20)
    assert levels[6] == 2 and levels[6 + 5] == 2 and levels[6 + 6] == 1 and levels[6 + 12] == 0
    assert levels[-1] == 0 and state.num_actions == 4


def test_a_relapse_doubles_the_healthy_steps_before_the_next_return():
    state = GuardState()
    waited = []
    for _ in range(6):
        _, state = levels_of(["bad"] * 3, state=state)
        assert state.level == 1
        steps = 0
        while state.level:
            _, state = levels_of(["healthy"], state=state)
            steps += 1
        waited.append(steps)
    assert waited == [6 * factor for factor in (1, 2, 4, 8, MOST_HOLD, MOST_HOLD)]


def test_a_step_without_tokens_changes_nothing():
    assert Observation.of({"actor/lr": 1.0}) is None
    state = GuardState(level=1, bad=2)
    assert advance(state, None, RULES, num_actions=4) == state


def test_the_sample_size_of_a_run_without_correction_is_that_of_its_ratios():
    metrics = {
        "rollout_corr/k3_kl": 1e-3,
        "rollout_corr/ratio_eff_sample_size": 0.97,
        "rollout_corr/abs_log_ratio_p999": 0.4,
    }
    assert Observation.of(metrics) == Observation(ess=0.97, k3=1e-3, tail=0.4)
    capped = Observation.of({**metrics, "rollout_corr/rollout_is_eff_sample_size": 0.99})
    assert capped is not None and capped.ess == 0.99


def test_a_state_survives_its_file():
    state = GuardState(level=2, bad=1, healthy=0, hold=4, went_down=True, num_actions=7, is_advice=True, layers=(3, 0))
    acted = replace(state, actions=(Action(kind="cap", value=1.5), Action(kind="bf16_layers", value=2)))
    for each in (state, acted):
        assert GuardState.from_json(json.loads(json.dumps(each.to_json()))) == each
    earlier = {name: value for name, value in acted.to_json().items() if name != "actions"}
    assert GuardState.from_json(earlier) == state
    assert GuardState.from_json(None) == GuardState()
    with pytest.raises(ValueError, match="not a saved state"):
        GuardState.from_json([1])


def test_actions_are_ordered_by_cost_and_only_those_that_change_something_exist():
    found = ladder(GuardConfig(), cap=2.0, layers_in_8_bits=8, kv_in_8_bits=False, overlap=2)
    assert [(action.kind, action.value) for action in found] == [
        ("cap", 1.5),
        ("cap", 1.2),
        ("bf16_layers", 2),
        ("bf16_layers", 4),
        ("overlap", 1),
        ("overlap", 0),
        ("bf16_rollouts", 1),
    ]
    assert ladder(GuardConfig(), cap=None, layers_in_8_bits=0, kv_in_8_bits=False, overlap=0) == ()
    assert ladder(GuardConfig(), cap=1.3, layers_in_8_bits=0, kv_in_8_bits=False, overlap=0) == (
        Action(kind="cap", value=1.2),
    )
    banded = ladder(GuardConfig(), cap=2.0, low=1.2, layers_in_8_bits=0, kv_in_8_bits=False, overlap=0)
    assert banded == (Action(kind="cap", value=1.5),)  # a cap of 1.2 would leave no weight
    one_layer = ladder(GuardConfig(), cap=None, layers_in_8_bits=1, kv_in_8_bits=False, overlap=0)
    assert [action.kind for action in one_layer] == ["bf16_rollouts"]
    keys_and_values = ladder(GuardConfig(), cap=None, layers_in_8_bits=0, kv_in_8_bits=True, overlap=0)
    assert [action.kind for action in keys_and_values] == ["bf16_rollouts"]


def test_layers_with_the_worst_measured_sqnr_come_first_and_stay_chosen():
    sqnr = {0: 31.0, 1: 12.0, 2: 40.0, 3: 20.0}
    assert worst_layers((), sqnr, 2) == (1, 3)
    rest = {0: 31.0, 2: 11.0}  # BF16 layers have no codes
    assert worst_layers((1, 3), rest, 3) == (1, 3, 2)
    assert worst_layers((1, 3, 2), rest, 1) == (1, 3, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patience": 5, "recover_after": 4}, "recover_after"),
        ({"caps": (1.2, 1.5)}, "caps"),
        ({"caps": (0.9,)}, "caps"),
        ({"bf16_layers": (1.0,)}, "bf16_layers"),
    ],
)
def test_rules_that_would_flap_or_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GuardConfig(**fields)
