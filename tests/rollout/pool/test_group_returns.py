"""What becomes of a group whose call has ended: over calls whose results the test sets."""

from dataclasses import replace

import pytest

from rollout.failures import CallError, StepLostError
from rollout.planning.dispatcher import Dispatcher
from rollout.planning.migration import GroupMigration
from rollout.planning.plan import FIRST, GroupForecast, RolloutPlan
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_losses import EngineLosses
from rollout.pool.group_places import GroupPlaces
from rollout.pool.group_returns import GroupReturns
from rollout.pool.migration_survey import MigrationSurvey
from rollout.pool.scorer_pool import ScorerPool
from rollout.pool.seat_counts import SeatCounts
from rollout.pool.seat_questions import SeatQuestions
from rollout.types import FinishReason, Score, ScoreStatus
from tests.support.pool_stress import ActorDiedError, Method, ObjectLostError, RayError, Ref, replace_ray
from tests.support.scored_groups import scored_group, scorer_answer

MADE = scored_group(7)
SIZE = len(MADE.group.seeds)
UNFINISHED = replace(MADE.summary, finish_reasons=(FinishReason.STOP, *[FinishReason.ABORT] * (SIZE - 1)))


class Scorer:
    """Scores nothing; the test sets the result of its calls."""

    def __init__(self) -> None:
        self.score = Method(lambda *_: Ref())


class Batches:
    """Notes which groups for training are complete."""

    def __init__(self) -> None:
        self.complete: list[int] = []

    def completed(self, scored) -> None:
        self.complete.append(scored.group.group_id)


class Pool:
    """Two engines, of which engine 0 samples the only group in `call`."""

    def __init__(self, *, whole_step: bool = False, purpose: str = "train") -> None:
        self.engines = EngineGroup(["first", "second"], num_ranks=1)
        self.places, self.dispatcher = GroupPlaces(), Dispatcher(2)
        self.seats = SeatCounts(2, seats_per_engine=8)
        self.migration = GroupMigration()
        self.batches = Batches()
        self.returns = GroupReturns(
            engines=self.engines,
            places=self.places,
            dispatcher=self.dispatcher,
            migration=self.migration,
            losses=EngineLosses(
                engines=self.engines,
                dispatcher=self.dispatcher,
                seats=self.seats,
                seat_questions=SeatQuestions(self.engines, self.seats),
                survey=MigrationSurvey(self.migration, self.engines, self.dispatcher, self.places),
                whole_step=whole_step,
            ),
            scorers=ScorerPool([Scorer()], timeout_s=600.0),
            batches=self.batches,
        )
        group = replace(MADE.group, purpose=purpose)
        forecast = GroupForecast(group_id=group.group_id, step=5, num_responses=SIZE, tokens=9.0)
        self.places.admit([group])
        self.dispatcher.admit(RolloutPlan(queues=((forecast,), ()), shares_work=True))
        self.dispatcher.take(0)
        self.seats.begin(0, SIZE)
        self.call = Ref()
        self.places.start(group.group_id, self.call, engine=0, incarnation=0, columns=MADE.columns)

    def sampled(self, value: object) -> None:
        """The engine's call has ended with a summary or an error."""
        self.call.value = value
        self.returns.generated(self.call)
        self.check()

    def scored(self, value: object) -> None:
        """The scorer's call has ended with an answer or an error."""
        (call,) = self.places.scoring
        call.value = value
        self.returns.scored(call)
        self.check()

    def check(self) -> None:
        self.places.check_integrity()
        self.dispatcher.check_integrity()
        self.seats.check_integrity()

    def waits(self) -> tuple[list[int], bool]:
        """Engines that could start the group next, and whether it continues with its tokens."""
        (item,) = self.places.waiting.values()
        return [engine for engine in range(2) if self.dispatcher.peek(engine) is not None], item.sampled is not None


@pytest.fixture(autouse=True)
def stand_in_for_ray(monkeypatch) -> None:
    replace_ray(monkeypatch, None)


def test_a_finished_group_frees_its_seats_and_is_scored():
    pool = Pool()
    pool.sampled(MADE.summary)
    assert pool.seats.used(0) == 0 and pool.dispatcher.queued_tokens() == (0.0, 0.0)
    (item,) = pool.places.scoring.values()
    assert (item.sampled.summary, item.sampled.columns) == (MADE.summary, MADE.columns)
    assert pool.batches.complete == []
    pool.scored(scorer_answer([Score(reward=2.0, status=ScoreStatus.OK)] * SIZE))
    (scored,) = pool.places.take([7])
    assert scored.rewards == (2.0,) * SIZE
    assert pool.batches.complete == [7] and pool.returns.num_reissued == 0


def test_a_group_of_an_evaluation_is_in_no_batch():
    pool = Pool(purpose="gsm8k")
    pool.sampled(MADE.summary)
    pool.scored(scorer_answer([Score(reward=2.0, status=ScoreStatus.OK)] * SIZE))
    assert pool.batches.complete == [] and list(pool.places.scored) == [7]


def test_a_group_of_a_dead_actor_begins_again_elsewhere():
    pool = Pool()
    pool.sampled(ActorDiedError("killed"))
    assert pool.engines.lost == (0,)
    assert pool.waits() == ([1], False) and pool.returns.num_reissued == 1


def test_a_group_of_an_engine_whose_vllm_died_continues_elsewhere_with_its_tokens():
    pool = Pool()
    pool.sampled(replace(UNFINISHED, fault="the core died"))
    assert pool.engines.loss_reason(0) == "the core died"
    assert pool.waits() == ([1], True) and pool.returns.num_reissued == 1


def test_a_group_that_had_ended_when_vllm_died_is_scored():
    pool = Pool()
    pool.sampled(replace(MADE.summary, fault="the core died"))
    assert pool.engines.lost == (0,)
    assert len(pool.places.scoring) == 1 and pool.returns.num_reissued == 0


def test_a_group_whose_engine_was_replaced_before_its_call_failed_begins_again_and_the_successor_serves():
    pool = Pool()
    pool.engines.mark_lost(0, "gone")
    pool.engines.replace(0, EngineGroup(["another"], num_ranks=1))
    pool.sampled(ActorDiedError("killed"))
    assert pool.engines.lost == ()
    assert pool.waits() == ([0, 1], False) and pool.seats.used(0) == 0


def test_a_group_whose_tokens_to_continue_were_lost_begins_again_without_a_loss_of_its_engine():
    pool = Pool()
    pool.sampled(ObjectLostError("gone"))
    assert pool.engines.lost == () and pool.seats.used(0) == 0
    assert pool.waits() == ([0, 1], False) and pool.returns.num_reissued == 1


@pytest.mark.parametrize(("summary", "waits"), [(UNFINISHED, ([1], True)), (MADE.summary, None)])
def test_a_group_that_migrates_waits_for_the_idle_engine_only_unless_it_has_ended(summary, waits):
    pool = Pool()
    pool.migration._leaving = (7, 1)
    pool.sampled(summary)
    assert pool.seats.used(0) == 0 and pool.returns.num_reissued == 0
    assert pool.migration.num_moved == (waits is not None)
    if waits is None:
        assert len(pool.places.scoring) == 1
    else:
        assert pool.waits() == waits


@pytest.mark.parametrize(
    ("value", "goes_on"), [(replace(UNFINISHED, fault="the core died"), True), (ActorDiedError("killed"), False)]
)
def test_a_group_whose_engine_dies_while_it_migrates_goes_where_there_is_room(value, goes_on):
    pool = Pool()
    pool.migration._leaving = (7, 0)  # its own engine, which nobody may wait for now
    pool.sampled(value)
    assert pool.migration.num_moved == 0 and pool.migration._leaving is None
    assert pool.waits() == ([1], goes_on) and pool.returns.num_reissued == 1


def test_a_group_whose_tokens_were_lost_before_it_was_scored_begins_again_before_all_others():
    pool = Pool()
    pool.sampled(MADE.summary)
    pool.engines.retire(0, "its node is gone")
    pool.returns.losses.follow()
    pool.scored(ObjectLostError("gone"))
    assert pool.waits() == ([1], False) and pool.returns.num_reissued == 1
    assert pool.dispatcher.peek(1).step == FIRST
    assert pool.batches.complete == []


def test_what_an_engine_raises_ends_the_run_and_names_the_group():
    pool = Pool()
    with pytest.raises(CallError, match="engine 0: group 7 failed: RayError: out of keys and values"):
        pool.sampled(RayError("out of keys and values"))


@pytest.mark.parametrize("error", [ActorDiedError("killed"), ObjectLostError("gone")])
def test_a_deterministic_run_loses_its_step(error):
    with pytest.raises(StepLostError):
        Pool(whole_step=True).sampled(error)
    pool = Pool(whole_step=True)
    pool.sampled(MADE.summary)
    with pytest.raises(StepLostError):
        pool.scored(ObjectLostError("gone"))
