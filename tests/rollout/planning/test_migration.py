"""A group moves if that ends it sooner; the group that gains most moves first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.planning.migration import MIN_GAIN, GroupMigration, InFlight, MigrationRule
from rollout.tracing.engine_speed import EngineSpeed
from rollout.types import GroupId

SPEED = EngineSpeed(fixed_s=0.010, token_s=4e-5, context_s=2.7e-8, saturated_requests=64)


def rule(left: dict[int, float], speed: EngineSpeed | None = SPEED) -> MigrationRule:
    return MigrationRule(remaining=lambda group, emitted: left[group] + 0 * emitted, speed=lambda: speed)


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
def test_the_group_that_saves_most_time_moves_if_the_saving_exceeds_the_cost(drawn):
    groups = [in_flight(number, *emitted) for number, (emitted, _) in enumerate(drawn)]
    left = {number: tokens for number, (_, tokens) in enumerate(drawn)}
    saved = {}
    for group in groups:
        price = SPEED.fixed_s + SPEED.token_s * sum(100 + emitted for emitted in group.emitted)
        gain = left[group.group_id] * (naive_forward_s(groups) - naive_forward_s([group])) - price
        if group.emitted and gain > MIN_GAIN * price:
            saved[group.group_id] = gain
    chosen = rule(left).choose(groups)
    assert (chosen is None) == (not saved)
    if saved:
        assert saved[chosen] == pytest.approx(max(saved.values()), rel=1e-9)


def test_the_only_group_of_an_engine_does_not_move():
    assert rule({0: 1e6}).choose([in_flight(0, 10, 20, 30)]) is None


def test_the_longest_group_leaves_a_full_engine_and_nearly_finished_groups_stay():
    full = [in_flight(number, *[6000] * 8) for number in range(15)]
    outlier = in_flight(99, 20_000)
    left = dict.fromkeys(range(15), 50.0)
    assert rule(left | {99: 8000.0}).choose([*full, outlier]) == 99
    assert rule(left | {99: 20.0}).choose([*full, outlier]) is None


def test_no_group_moves_without_a_measured_speed():
    assert rule({0: 1e6, 1: 1e6}, speed=None).choose([in_flight(0, 1), in_flight(1, 1)]) is None


def asked(left: dict[int, float]) -> GroupMigration:
    """Engine 0 is idle, so engine 1, which has most groups, was asked for its requests."""
    migration = GroupMigration(rule=rule(left))
    assert migration.donor({1: 3, 2: 2}, idle=0) == 1
    assert migration.donor({1: 3, 2: 2}, idle=0) is None, "one is asked at a time"
    return migration


FULL = [in_flight(7, 20_000), *(in_flight(number, *[6000] * 8) for number in range(6))]
LEFT = dict.fromkeys(range(6), 50.0) | {7: 8000.0}


def test_a_chosen_group_resumes_on_the_idle_engine_and_counts_once():
    migration = asked(LEFT)
    assert migration.answered(FULL, idle=0) == 7
    assert migration.returned(GroupId(3), resumable=False) is None
    assert migration.donor({1: 3}, idle=0) is None, "one group moves at a time"
    assert migration.num_moved == 0
    assert migration.returned(GroupId(7), resumable=True) == 0
    assert migration.num_moved == 1
    assert migration.returned(GroupId(7), resumable=True) is None


def test_a_group_that_ends_before_its_migration_does_not_move():
    migration = asked(LEFT)
    migration.answered(FULL, idle=0)
    assert migration.returned(GroupId(7), resumable=False) is None
    assert migration.num_moved == 0
    assert migration.donor({1: 3}, idle=0) == 1


def test_after_an_answer_without_migration_no_engine_is_asked_until_a_group_returns():
    migration = asked(dict.fromkeys(range(8), 0.0))
    assert migration.answered(FULL, idle=0) is None
    assert migration.donor({1: 3}, idle=0) is None
    migration.returned(GroupId(3), resumable=False)
    assert migration.donor({1: 3}, idle=0) == 1


def test_another_engine_is_asked_after_the_asked_engine_died():
    migration = asked(LEFT)
    assert not migration.lost(2)
    assert migration.lost(1)
    assert migration.donor({2: 2}, idle=0) == 2
