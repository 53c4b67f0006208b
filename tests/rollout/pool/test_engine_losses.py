"""What the loss and the return of engines do to queues, seats and questions; over engines that are never called."""

from dataclasses import dataclass

import pytest

from rollout.failures import CallError, ProcessLostError, StepLostError
from rollout.planning.dispatcher import Dispatcher
from rollout.planning.migration import GroupMigration
from rollout.planning.plan import plan_first
from rollout.pool import engine_losses
from rollout.pool.engine_call import EngineQuestion
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_losses import EngineLosses
from rollout.pool.group_places import Generating, GroupPlaces
from rollout.pool.migration_survey import MigrationSurvey
from rollout.pool.seat_counts import SeatCounts
from rollout.pool.seat_questions import SeatQuestion, SeatQuestions
from tests.support.pool_stress import ActorDiedError, FakeRay, RayError
from tests.support.scored_groups import scored_group

GROUPS = [scored_group(number).group for number in range(4)]
SIZE = len(GROUPS[0].seeds)


class NothingMoves:
    def choose(self, running: object) -> None:
        """A rule of migration."""


@dataclass
class Pool:
    """Two engines; each has begun a group and has another one waiting, and is asked for seats."""

    whole_step: bool = False

    def __post_init__(self) -> None:
        self.engines = EngineGroup(["first", "second"], num_ranks=1)
        self.dispatcher = Dispatcher(2)
        self.seats = SeatCounts(2, seats_per_engine=SIZE)
        self.questions = SeatQuestions(self.engines, self.seats)
        self.migration = GroupMigration(rule=NothingMoves())
        self.survey = MigrationSurvey(self.migration, self.engines, self.dispatcher, GroupPlaces())
        self.losses = EngineLosses(
            engines=self.engines,
            dispatcher=self.dispatcher,
            seats=self.seats,
            seat_questions=self.questions,
            survey=self.survey,
            whole_step=self.whole_step,
        )
        self.dispatcher.admit(plan_first(GROUPS, num_engines=2))
        for engine in range(2):
            self.dispatcher.take(engine)
            self.seats.begin(engine, SIZE)
            self.questions.calls[f"seats {engine}"] = SeatQuestion(
                engine=engine, incarnation=0, method="ended_at_least", num_ended=2
            )

    def replace(self, engine: int) -> None:
        """Another engine takes the number of a lost one."""
        self.engines.mark_lost(engine, "gone")
        self.engines.replace(engine, EngineGroup(["another"], num_ranks=1))

    def check(self) -> None:
        self.dispatcher.check_integrity()
        self.seats.check_integrity()


def generating(engine: int, *, incarnation: int = 0) -> Generating:
    return Generating(group=GROUPS[engine], engine=engine, incarnation=incarnation, columns=())


@pytest.fixture
def pool(monkeypatch) -> Pool:
    monkeypatch.setattr(engine_losses, "ray", FakeRay(None))
    return Pool()


def test_the_waiting_groups_of_a_lost_engine_move_and_its_seats_and_questions_are_reset(pool):
    pool.engines.mark_lost(0, "gone")
    pool.losses.follow()
    assert pool.losses.closed == {0}
    assert pool.dispatcher.peek(0) is None
    assert pool.dispatcher.homes() == {0: [0], 1: [1, 2, 3]}
    assert (pool.seats.used(0), pool.seats.used(1)) == (0, SIZE)
    assert list(pool.questions.calls) == ["seats 1"]
    pool.check()


def test_an_engine_that_serves_again_is_given_groups(pool):
    pool.engines.mark_lost(0, "gone")
    pool.losses.follow()
    pool.replace(0)
    pool.losses.follow()
    assert pool.losses.closed == frozenset()
    assert pool.dispatcher.peek(0) is not None
    pool.check()


def test_a_replacement_between_two_looks_resets_the_seats_and_leaves_the_queue_open(pool):
    pool.replace(0)
    pool.losses.follow()
    assert pool.losses.closed == frozenset()
    assert pool.seats.used(0) == 0 and list(pool.questions.calls) == ["seats 1"]
    assert pool.dispatcher.peek(0) is not None
    pool.seats.begin(0, SIZE)
    pool.losses.follow()
    assert pool.seats.used(0) == SIZE, "the seats of the successor were reset"


def test_groups_that_wait_while_no_engine_is_left_go_to_the_one_that_returns(pool):
    for engine in range(2):
        pool.engines.mark_lost(engine, "gone")
    pool.losses.follow()
    pool.replace(1)
    pool.losses.follow()
    assert sorted(pool.dispatcher.homes()[1]) == [1, 2, 3]
    pool.check()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_call_that_fails_is_the_loss_of_the_engine_that_was_called_and_not_of_its_successor(pool, is_replaced):
    if is_replaced:
        pool.replace(1)
    pool.losses.call_failed(1, 0, "in_flight", ActorDiedError("killed"))
    assert pool.engines.lost == (() if is_replaced else (1,))
    assert pool.seats.used(1) == 0, "the loss was not acted on"


def test_the_first_reason_of_a_loss_stays(pool):
    pool.engines.mark_lost(0, "it emitted no token")
    pool.losses.died(0, 0, ProcessLostError("vLLM's process has ended"))
    assert pool.engines.loss_reason(0) == "it emitted no token"


def test_an_engine_that_raises_is_named_and_is_not_lost(pool):
    with pytest.raises(CallError, match="engine 1: group 7 failed: RayError: out of keys") as failed:
        pool.losses.call_failed(1, 0, "group 7", RayError("out of keys"))
    assert failed.value.place.ranks == (1,) and pool.engines.lost == ()


def test_the_seats_of_a_group_count_until_its_engine_is_lost(pool):
    pool.losses.free_seats(generating(0))
    assert pool.seats.used(0) == 0
    pool.replace(1)
    pool.losses.follow()
    pool.seats.begin(1, SIZE)
    pool.losses.free_seats(generating(1))  # of the lost engine
    pool.losses.take_back_seats(generating(1))
    assert pool.seats.used(1) == SIZE
    pool.losses.take_back_seats(generating(1, incarnation=1))
    assert pool.seats.used(1) == 0
    pool.check()


def test_a_group_that_returns_after_the_loss_of_its_engine_frees_no_seats(pool):
    pool.engines.mark_lost(0, "gone")
    pool.losses.follow()
    pool.losses.free_seats(generating(0))
    pool.losses.take_back_seats(generating(0))
    assert pool.seats.used(0) == 0
    pool.check()


def test_seats_that_are_taken_back_make_questions_void(pool):
    """The engine will not end as many responses as it was asked for."""
    pool.losses.take_back_seats(generating(0))
    assert pool.seats.used(0) == 0 and list(pool.questions.calls) == ["seats 1"]


def test_a_question_about_running_groups_is_void_with_its_engine(pool):
    survey = pool.survey
    assert pool.migration.donor({0: 2}, 1) == 0
    survey.calls["survey"] = EngineQuestion(engine=0, incarnation=0, method="in_flight")
    pool.engines.mark_lost(1, "gone")
    pool.losses.follow()
    assert list(survey.calls) == ["survey"]
    pool.engines.mark_lost(0, "gone")
    pool.losses.follow()
    assert survey.calls == {}


def test_a_deterministic_run_loses_its_step_with_its_engine_or_with_tokens(monkeypatch):
    monkeypatch.setattr(engine_losses, "ray", FakeRay(None))
    pool = Pool(whole_step=True)
    pool.losses.check_step()
    with pytest.raises(StepLostError, match="tokens of group 3 were lost with a node, and a deterministic run"):
        pool.losses.check_tokens(3, RayError("gone"))
    with pytest.raises(StepLostError, match=r"engine 0 died, and .*: ActorDiedError: killed") as lost:
        pool.losses.call_failed(0, 0, "group 0", ActorDiedError("killed"))
    assert lost.value.place.ranks == (0,)
    with pytest.raises(StepLostError):
        pool.losses.check_step()


def test_any_other_run_says_that_a_group_is_sampled_again(pool, caplog):
    pool.losses.check_step()
    pool.losses.check_tokens(3, RayError("gone"))
    assert caplog.messages == ["the tokens of group 3 were lost with a node; it is sampled again"]
