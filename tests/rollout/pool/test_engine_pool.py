"""Engines that planning sees, and free seats of engines; over engines that are never called, or in this process."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from rollout.planning.admission import FixedBatches
from rollout.planning.plan import GroupForecast
from rollout.planning.policies import plan
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.types import GroupId
from tests.rollout.pool.test_history_client import Calm
from tests.support.pool_stress import SIZE, ActorDiedError, Engine, Method, Ref, Watched, groups_of, replace_ray
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


def forecasts(count: int, *, step: int = 0) -> list[GroupForecast]:
    """Groups of one step with equal forecasts."""
    return [
        GroupForecast(group_id=GroupId(step * count + number), step=step, num_responses=SIZE, tokens=9.0)
        for number in range(count)
    ]


class Mute(Engine):
    """Never says how many of its responses have ended."""

    def _answer(self) -> None:
        pass


def test_a_step_finds_free_the_seats_of_groups_that_have_ended_and_is_spread_over_all_engines(monkeypatch) -> None:
    """Two steps take as many seats as there are, and nobody asks for free seats while no group waits."""
    world, begun, per_step, num_steps = Calm(random.Random(0)), Counter(), 64 // SIZE, 3
    replace_ray(monkeypatch, world)
    world.engines = EngineGroup([Engine(world), Mute(world)], num_ranks=1)
    admission = FixedBatches(draw=lambda step: forecasts(per_step, step=step), num_steps=num_steps)
    pool = EnginePool(
        world.engines,
        [world.scorer],
        seats_per_engine=64,
        batches=Watched(admission),
        on_start=lambda group, engine: begun.update([(group.step, engine)]),
    )
    for step in range(num_steps):
        due = admission.due(step)
        pool.admit(groups_of(due), plan("adaptive", due, pool.loads()))
        assert len(pool.take_batch(step)) == per_step
        pool.check_integrity()
    assert begun == {(step, engine): per_step // 2 for step in range(num_steps) for engine in (0, 1)}


class Asked:
    """An engine that begins groups and answers nothing; notes for how many ended responses it is asked."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.generate_group = Method(lambda *_: (Ref(), Ref()))
        self.ended_at_least = Method(self._ended_at_least)

    def _ended_at_least(self, count: int) -> Ref:
        self.counts.append(count)
        return Ref()


def test_a_full_engine_is_asked_again_only_for_a_group_that_needs_fewer_seats() -> None:
    """Half of a training group waits for two seats; an evaluation's group of one response needs one."""
    engine = Asked()
    pool = EnginePool(EngineGroup([engine], num_ranks=1), [], seats_per_engine=SIZE)
    due = forecasts(3)
    pool.admit(groups_of(due[:2]), plan("adaptive", due[:2], pool.loads()))
    assert engine.counts == [SIZE // 2]
    pool.admit(groups_of(due[2:]), plan("adaptive", due[2:], pool.loads()))
    assert engine.counts == [SIZE // 2]
    for number in (10, 11):
        pool.admit([scored_group(number, num_samples=1).group])
    assert engine.counts == [SIZE // 2, 1]


def test_groups_that_wait_while_no_engine_is_left_start_on_one_that_was_replaced_since(monkeypatch) -> None:
    world = Calm(random.Random(0))
    replace_ray(monkeypatch, world)
    world.engines = EngineGroup([Engine(world)], num_ranks=1)
    pool = EnginePool(world.engines, [world.scorer], seats_per_engine=SEATS)
    world.engines.mark_lost(0, "its node is gone")
    pool.admit([scored_group(number).group for number in range(3)])
    world.engines.replace(0, EngineGroup([Engine(world)], num_ranks=1))
    assert [scored.group.group_id for scored in pool.take("train", 0)] == [0, 1, 2]
    pool.check_integrity()


class Replaced(Calm):
    """Engine 0 dies and is replaced while the pool waits; of its calls, the question for seats fails first."""

    old: Engine | None = None

    def happen(self) -> None:
        if self.old is None:
            self.old = self.engines.actors[0]
            self.engines.mark_lost(0, "its node is gone")
            self.engines.replace(0, EngineGroup([Engine(self)], num_ranks=1))
            for _, ref in self.old.asked:
                ref.is_ready, ref.value = True, ActorDiedError("killed")
        elif self.old.is_alive:
            self.old.die(with_actor=True)
        else:
            super().happen()


def test_a_late_failure_of_a_question_is_no_loss_of_the_engine_that_was_started_meanwhile(monkeypatch) -> None:
    world = Replaced(random.Random(0))
    replace_ray(monkeypatch, world)
    world.engines = EngineGroup([Engine(world)], num_ranks=1)
    pool = EnginePool(world.engines, [world.scorer], seats_per_engine=SIZE)
    pool.admit([scored_group(number).group for number in range(3)])
    assert [scored.group.group_id for scored in pool.take("train", 0)] == [0, 1, 2]
    assert world.engines.lost == () and pool.num_reissued == 1
    pool.check_integrity()


class Held(EngineGroup):
    """Engines that need not be told to hold and begin a step; notes the groups of each step."""

    steps: tuple[list[GroupId], ...] = ()

    def hold(self, *, timeout_s: float) -> None:
        """Nothing to do."""

    def release(self, group_ids: Sequence[GroupId], *, timeout_s: float) -> None:
        """Note the groups of a step."""
        self.steps += (list(group_ids),)


@pytest.mark.parametrize("is_noticed", [False, True], ids=["unnoticed", "noticed"])
def test_a_deterministic_step_starts_on_an_engine_that_was_replaced_since_the_last_one(monkeypatch, is_noticed) -> None:
    world = Calm(random.Random(0))
    replace_ray(monkeypatch, world)
    world.engines = Held([Engine(world)], num_ranks=1)
    pool = EnginePool(world.engines, [world.scorer], seats_per_engine=SIZE, whole_step=True)
    for step in range(2):
        pool.admit(groups_of(forecasts(2, step=step)))
        assert len(pool.take("train", step)) == 2
        pool.check_integrity()
        world.engines.mark_lost(0, "it died while the trainer worked")
        if is_noticed:
            pool._take_turn()
        world.engines.replace(0, EngineGroup([Engine(world)], num_ranks=1))
    assert world.engines.steps == ([0, 1], [2, 3])


def test_the_thread_of_a_pool_restarts_no_engine_because_the_trainer_works() -> None:
    engines, revived = EngineGroup(["first"], num_ranks=1), []
    pool = EnginePool(engines, [], seats_per_engine=SEATS, revive=lambda: revived.append("an engine"))
    engines.mark_lost(0, "gone")
    pool.admit([scored_group(0).group])
    assert not pool._take_turn() and revived == []
