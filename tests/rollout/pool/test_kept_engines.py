"""Engines for which groups are planned, over engines that are never called."""

import pytest

from rollout.planning.plan import GroupForecast, RolloutPlan
from rollout.pool.engine_group import EngineGroup
from rollout.pool.kept_engines import kept_engines, plan_over_all
from rollout.types import GroupId
from tests.support.scored_groups import scored_group


def engines_without(*retired: int) -> EngineGroup:
    """Three engines, of which some are retired; engine 2 is lost and will serve again."""
    engines = EngineGroup(["first", "second", "third"], num_ranks=1)
    engines.mark_lost(2, "it is restarted later")
    for number in retired:
        engines.retire(number, "its node is gone")
    return engines


def ids(plan: RolloutPlan) -> list[list[int]]:
    return [[forecast.group_id for forecast in queue] for queue in plan.queues]


def test_a_lost_engine_is_kept_and_a_retired_one_is_not():
    assert kept_engines(engines_without()) == [0, 1, 2]
    assert kept_engines(engines_without(1)) == [0, 2]
    assert kept_engines(engines_without(0, 1, 2)) == []


def test_without_a_plan_groups_go_in_turn_to_the_engines_that_are_kept():
    groups = [scored_group(number).group for number in range(5)]
    assert ids(plan_over_all(engines_without(1), groups)) == [[0, 2, 4], [], [1, 3]]
    assert ids(plan_over_all(engines_without(), groups)) == [[0, 3], [1, 4], [2]]


def test_a_plan_over_the_kept_engines_gets_their_numbers_and_keeps_its_rules():
    queues = tuple(
        (GroupForecast(group_id=GroupId(number), step=3, num_responses=4, tokens=9.0),) for number in range(2)
    )
    plan = RolloutPlan(queues=queues, shares_work=False, steps_together=2)
    over_all = plan_over_all(engines_without(0), [], plan)
    assert over_all == RolloutPlan(queues=((), *queues), shares_work=False, steps_together=2)


def test_a_plan_over_another_number_of_engines_is_refused():
    plan = RolloutPlan(queues=((), (), ()), shares_work=True)
    with pytest.raises(ValueError, match="longer"):
        plan_over_all(engines_without(1), [], plan)
