"""Which engines are asked for free seats, and what their answers count; over engines that only note questions."""

import pytest

from rollout.pool import seat_questions
from rollout.pool.engine_group import EngineGroup
from rollout.pool.seat_counts import SeatCounts
from rollout.pool.seat_questions import SeatQuestions
from tests.support.pool_stress import ActorDiedError, FakeRay, Method, Ref

SEATS = 8


class Asked:
    """Notes for how many ended responses it is asked, and answers nothing."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.ended_at_least = Method(self._note)

    def _note(self, count: int) -> Ref:
        self.counts.append(count)
        return Ref()


@pytest.fixture
def asked(monkeypatch) -> tuple[list[Asked], SeatCounts, SeatQuestions]:
    """Two full engines, the pool's counts of their seats, and the questions."""
    monkeypatch.setattr(seat_questions, "ray", FakeRay(None))
    engines, seats = [Asked(), Asked()], SeatCounts(2, seats_per_engine=SEATS)
    for engine in range(2):
        seats.begin(engine, SEATS)
    return engines, seats, SeatQuestions(EngineGroup(engines, num_ranks=1), seats)


def test_an_engine_is_asked_again_only_for_fewer_responses(asked):
    engines, _, questions = asked
    for full in ({0: 4}, {0: 4, 1: 2}, {0: 5, 1: 3}, {0: 2}, {0: 3}):
        questions.ask(full)
    assert [engine.counts for engine in engines] == [[4, 2], [2]]
    under_way = [(question.engine, question.num_ended) for question in questions.calls.values()]
    assert under_way == [(0, 4), (1, 2), (0, 2)]


def test_an_answer_frees_seats_and_the_engine_may_be_asked_for_more(asked):
    engines, seats, questions = asked
    questions.ask({0: 4})
    (call,) = questions.calls
    call.value = 5
    questions.answered(call)
    assert seats.free(0) == 5 and not questions.calls
    questions.ask({0: 6})
    assert engines[0].counts == [4, 6]


def test_of_two_questions_the_one_for_more_responses_stays_when_the_other_is_answered(asked):
    engines, _, questions = asked
    questions.ask({0: 4})
    questions.ask({0: 2})
    first, second = questions.calls
    second.value = 2
    questions.answered(second)
    assert list(questions.calls) == [first]
    questions.ask({0: 4})
    assert engines[0].counts == [4, 2]


def test_questions_to_a_lost_engine_are_forgotten_and_its_successor_is_asked(asked):
    engines, _, questions = asked
    questions.ask({0: 4, 1: 4})
    questions.forget(0)
    assert [question.engine for question in questions.calls.values()] == [1]
    questions.ask({0: 6, 1: 6})
    assert [engine.counts for engine in engines] == [[4, 6], [4]]


def test_a_question_that_failed_raises_the_error_and_is_not_under_way_any_more(asked):
    _, seats, questions = asked
    questions.ask({1: 4})
    (call,) = questions.calls
    call.value = ActorDiedError("gone")
    with pytest.raises(ActorDiedError):
        questions.answered(call)
    assert not questions.calls and seats.free(1) == 0
