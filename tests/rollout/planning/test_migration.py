"""A group moves where that ends it sooner, and the one that gains most moves first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.planning.migration import MIN_GAIN, InFlight, Mover
from rollout.tracing.engine_speed import EngineSpeed
from rollout.types import GroupId

SPEED = EngineSpeed(fixed_s=0.010, token_s=4e-5, context_s=2.7e-8, saturated_requests=64)


def mover(left: dict[int, float], speed: EngineSpeed | None = SPEED) -> Mover:
    return Mover(remaining=lambda group, emitted: left[group] + 0 * emitted, speed=lambda: speed)


def in_flight(number: int, *emitted: int, prompt: int = 100) -> InFlight:
    return InFlight(group_id=GroupId(number), num_prompt_tokens=prompt, emitted=emitted)


def naive_forward_s(groups: list[InFlight]) -> float:
    seconds = SPEED.fixed_s
    for group in groups:
        for emitted in group.emitted:
            seconds += SPEED.token_s + SPEED.context_s * (group.num_prompt_tokens + emitted)
    return seconds


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 30_000), max_size=8), st.floats(0, 20_000)), max_size=8),
)
def test_the_group_that_saves_most_moves_if_it_saves_more_than_it_costs(drawn):
    groups = [in_flight(number, *emitted) for number, (emitted, _) in enumerate(drawn)]
    left = {number: tokens for number, (_, tokens) in enumerate(drawn)}
    saved = {}
    for group in groups:
        price = SPEED.fixed_s + SPEED.token_s * sum(100 + emitted for emitted in group.emitted)
        gain = left[group.group_id] * (naive_forward_s(groups) - naive_forward_s([group])) - price
        if group.emitted and gain > MIN_GAIN * price:
            saved[group.group_id] = gain
    chosen = mover(left).choose(groups)
    assert (chosen is None) == (not saved)
    if saved:
        assert saved[chosen] == pytest.approx(max(saved.values()), rel=1e-9)


def test_nobody_moves_off_an_engine_that_has_nothing_else():
    assert mover({0: 1e6}).choose([in_flight(0, 10, 20, 30)]) is None


def test_the_outlier_leaves_a_full_engine_and_what_is_nearly_over_stays():
    full = [in_flight(number, *[6000] * 8) for number in range(15)]
    outlier = in_flight(99, 20_000)
    left = dict.fromkeys(range(15), 50.0)
    assert mover(left | {99: 8000.0}).choose([*full, outlier]) == 99
    assert mover(left | {99: 20.0}).choose([*full, outlier]) is None


def test_without_a_measured_speed_all_stay():
    assert mover({0: 1e6, 1: 1e6}, speed=None).choose([in_flight(0, 1), in_flight(1, 1)]) is None
