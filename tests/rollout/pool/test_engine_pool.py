"""Engines that planning sees; over engines that are never called."""

from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from tests.support.scored_groups import scored_group

SEATS = 8


def test_a_retired_engine_is_not_planned_for() -> None:
    engines = EngineGroup(["first", "second", "third"], num_ranks=1)
    pool = EnginePool(engines, [], seats_per_engine=SEATS)
    groups = [scored_group(number).group for number in range(4)]
    engines.mark_lost(2, "it is restarted later")
    assert len(pool.loads()) == 3 and all(pool.planned(groups).values())
    engines.retire(1, "its node is gone")
    assert [load.num_seats for load in pool.loads()] == [SEATS, SEATS]
    assert pool.planned(groups) == {0: [groups[0], groups[2]], 1: [], 2: [groups[1], groups[3]]}


def test_loads_are_those_of_the_engines_that_are_kept() -> None:
    engines = EngineGroup(["first", "second", "third"], num_ranks=1)
    pool = EnginePool(engines, [], seats_per_engine=SEATS)
    groups = [scored_group(number).group for number in range(3)]
    work = float(sum(len(group.seeds) * group.sampling.max_response_tokens for group in groups))
    for number in range(3):
        engines.mark_lost(number, "nothing starts, and the groups wait for the engine that was lost last")
    pool.admit(groups)
    assert [load.queued_tokens for load in pool.loads()] == [0.0, 0.0, work]
    engines.retire(1, "its node is gone")
    assert [load.queued_tokens for load in pool.loads()] == [0.0, work]
