"""Which engine is asked for its running groups, and what its answer moves; over engines that only note calls."""

from dataclasses import replace

import pytest

from rollout.planning.dispatcher import Dispatcher
from rollout.planning.migration import GroupMigration, InFlight
from rollout.planning.plan import plan_first
from rollout.pool import migration_survey
from rollout.pool.engine_group import EngineGroup
from rollout.pool.group_places import GroupPlaces
from rollout.pool.migration_survey import MigrationSurvey
from tests.support.pool_stress import ActorDiedError, FakeRay, Method, Ref
from tests.support.scored_groups import scored_group


class Engine:
    """Notes what it is asked and told."""

    def __init__(self) -> None:
        self.aborted: list[int] = []
        self.in_flight = Method(Ref)
        self.abort = Method(self.aborted.append)


class FirstMoves:
    """A rule of migration."""

    def choose(self, running):
        return running[0].group_id if running else None


class Pool:
    """Three engines: 0 samples two training groups and one of an evaluation, 1 samples one group, 2 idles."""

    def __init__(self) -> None:
        self.engines = [Engine(), Engine(), Engine()]
        self.group, self.places = EngineGroup(self.engines, num_ranks=1), GroupPlaces()
        groups = [scored_group(number).group for number in range(4)]
        groups[0] = replace(groups[0], purpose="gsm8k")
        self.places.admit(groups)
        for number, engine in enumerate([0, 0, 0, 1]):
            self.places.start(number, f"call {number}", engine=engine, incarnation=0, columns=())
        self.migration, self.dispatcher = GroupMigration(rule=FirstMoves()), Dispatcher(3)
        self.survey = MigrationSurvey(self.migration, self.group, self.dispatcher, self.places)

    def answered(self, *running: int) -> None:
        """The engine answers with these groups."""
        (call,) = self.survey.calls
        call.value = [InFlight(group_id=number, num_prompt_tokens=5, emitted=(3,)) for number in running]
        self.survey.answered(call)


@pytest.fixture
def pool(monkeypatch) -> Pool:
    monkeypatch.setattr(migration_survey, "ray", FakeRay(None))
    return Pool()


def test_the_busiest_engine_is_asked_once_while_another_one_idles(pool):
    pool.survey.ask(closed=())
    (asked,) = pool.survey.calls.values()
    assert (asked.engine, asked.incarnation, asked.method) == (0, 0, "in_flight")
    pool.survey.ask(closed=())
    assert len(pool.survey.calls) == 1


def test_nobody_is_asked_while_the_idle_engine_could_start_a_waiting_group(pool):
    waiting = scored_group(9).group
    pool.places.admit([waiting])
    pool.dispatcher.admit(plan_first([waiting], num_engines=3))
    pool.survey.ask(closed=())
    assert pool.survey.calls == {}


def test_a_lost_engine_is_not_asked_and_is_not_idle(pool):
    pool.survey.ask(closed={0})
    assert pool.survey.calls == {}, "the other engine has one group only"
    pool.group.mark_lost(2, "gone")
    pool.survey.ask(closed={2})
    assert pool.survey.calls == {}


def test_the_group_that_moves_is_aborted_and_groups_of_an_evaluation_stay(pool):
    pool.survey.ask(closed=())
    pool.answered(0, 1, 2)
    assert [engine.aborted for engine in pool.engines] == [[1], [], []]
    assert pool.survey.calls == {}
    assert pool.migration.returned(1, resumable=True) == 2


def test_a_group_that_is_no_longer_sampled_there_does_not_move(pool):
    pool.survey.ask(closed=())
    for number in (1, 2):
        pool.places.interrupt(f"call {number}")
    pool.answered(0, 1, 2)
    assert [engine.aborted for engine in pool.engines] == [[], [], []]


def test_a_question_to_an_engine_that_died_is_void_and_another_one_can_be_asked(pool):
    pool.survey.ask(closed=())
    (call,) = pool.survey.calls
    call.value = ActorDiedError("killed")
    with pytest.raises(ActorDiedError):
        pool.survey.answered(call)
    assert pool.survey.calls == {}
    pool.survey.lost(0)
    pool.survey.ask(closed=())
    assert len(pool.survey.calls) == 1
