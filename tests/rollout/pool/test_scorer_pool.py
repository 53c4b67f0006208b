"""Which scorer gets a group, and what is counted; over stand-ins for Ray's calls."""

from dataclasses import dataclass, replace

import pytest

from rollout.pool import scorer_pool
from rollout.pool.group_places import Sampled, Scoring
from rollout.pool.scorer_pool import ScorerPool, scoring_timeout_s
from rollout.processes import ProcessId
from rollout.types import ColumnsRef, Score, ScorerAnswer, ScoreStatus, WorkerEvents
from tests.support.scored_groups import scored_group


class Method:
    def remote(self, group: object, columns: object) -> str:
        del columns
        return f"call of {group}"


class Scorer:
    score = Method()


@dataclass
class Answers:
    """`ray` as the pool uses it: the next answer, whatever the call."""

    answer: ScorerAnswer | None = None

    def get(self, ref: object) -> ScorerAnswer | None:
        del ref
        return self.answer


def group_of(size: int):
    group = scored_group(0).group
    return replace(group, seeds=tuple(range(size)))


def answer(pid: int, **events: int) -> ScorerAnswer:
    process = ProcessId(node_id="n", pid=pid, created_s=float(pid))
    return ScorerAnswer(
        scores=(Score(reward=1.0, status=ScoreStatus.OK),), process=process, events=WorkerEvents(**events)
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    fake = Answers()
    monkeypatch.setattr(scorer_pool.ray, "get", fake.get)
    return fake


def finish(pool: ScorerPool, number: int, size: int) -> None:
    made = scored_group(0)
    sampled = Sampled(summary=made.summary, columns=ColumnsRef(None))
    pool.finish("call", Scoring(group=group_of(size), sampled=sampled, scorer=number))


def test_a_group_goes_to_the_scorer_with_the_fewest_responses(answers: Answers) -> None:
    pool = ScorerPool([Scorer(), Scorer(), Scorer()], timeout_s=9.0)
    assert [pool.submit(group_of(size), ColumnsRef(None))[1] for size in (8, 4, 2, 1, 2)] == [0, 1, 2, 2, 2]
    answers.answer = answer(1)
    finish(pool, 0, 8)
    assert pool.submit(group_of(1), ColumnsRef(None))[1] == 0


def test_a_restart_counts_once_also_if_the_old_process_answers_late(answers: Answers) -> None:
    pool = ScorerPool([Scorer()], timeout_s=9.0)
    for pid in (1, 2, 1, 2, 3):
        pool.submit(group_of(1), ColumnsRef(None))
        answers.answer = answer(pid)
        finish(pool, 0, 1)
    assert pool.num_restarts == 2


def test_events_of_workers_add_up_over_answers_and_scorers(answers: Answers) -> None:
    pool = ScorerPool([Scorer(), Scorer()], timeout_s=9.0)
    for number, given in enumerate([{"num_restarts": 2}, {"num_restarts": 1, "num_strays": 3}]):
        pool.submit(group_of(1), ColumnsRef(None))
        answers.answer = answer(number, **given)
        finish(pool, number, 1)
    assert pool.events == WorkerEvents(num_restarts=3, num_strays=3)


def test_a_scorer_may_take_as_long_as_its_largest_group_by_one_worker_needs() -> None:
    assert scoring_timeout_s([1, 16, 4], reward_timeout_s=10.0) == 17 * 10.0 + 120.0
