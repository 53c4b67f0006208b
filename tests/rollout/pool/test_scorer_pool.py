"""Which scorer gets a group, and what is counted; over stand-ins for Ray's calls."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import ray

from rollout.failures import TokensLostError
from rollout.pool import heartbeat, scorer_pool
from rollout.pool.group_places import Sampled, Scoring
from rollout.pool.heartbeat import Heartbeat
from rollout.pool.scorer_pool import ScorerPool, scoring_timeout_s
from rollout.processes import ProcessId
from rollout.types import ColumnsRef, Score, ScorerAnswer, ScoreStatus, WorkerEvents
from tests.support.scored_groups import scored_group


class Method:
    def remote(self, group: object, *parts: object) -> str:
        del parts
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
    process = ProcessId(node_id="n", pid=pid, start_ticks=pid)
    return ScorerAnswer(
        scores=(Score(reward=1.0, status=ScoreStatus.OK),), process=process, events=WorkerEvents(**events)
    )


@pytest.fixture
def given_answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    fake = Answers()
    monkeypatch.setattr(scorer_pool.ray, "get", fake.get)
    return fake


def finish(pool: ScorerPool, number: int, size: int) -> None:
    made = scored_group(0)
    sampled = Sampled(summary=made.summary, columns=(ColumnsRef(None),))
    pool.finish("call", Scoring(group=group_of(size), sampled=sampled, scorer=number))


def test_a_group_goes_to_the_scorer_with_the_fewest_responses(given_answers: Answers) -> None:
    pool = ScorerPool([Scorer(), Scorer(), Scorer()], timeout_s=9.0)
    assert [pool.submit(group_of(size), (ColumnsRef(None),))[1] for size in (8, 4, 2, 1, 2)] == [0, 1, 2, 2, 2]
    given_answers.answer = answer(1)
    finish(pool, 0, 8)
    assert pool.submit(group_of(1), (ColumnsRef(None),))[1] == 0


def test_a_restart_counts_once_also_if_the_old_process_answers_late(given_answers: Answers) -> None:
    pool = ScorerPool([Scorer()], timeout_s=9.0)
    for pid in (1, 2, 1, 2, 3):
        pool.submit(group_of(1), (ColumnsRef(None),))
        given_answers.answer = answer(pid)
        finish(pool, 0, 1)
    assert pool.num_restarts == 2


def test_a_restart_is_told_once(given_answers: Answers, caplog: pytest.LogCaptureFixture) -> None:
    pool = ScorerPool([Scorer()], timeout_s=9.0)
    for pid in (1, 2, 1, 2):
        pool.submit(group_of(1), (ColumnsRef(None),))
        given_answers.answer = answer(pid)
        finish(pool, 0, 1)
    assert caplog.messages == ["scorer 0 died or was killed; process 2 has taken its place"]


def test_events_of_workers_add_up_over_answers_and_scorers(given_answers: Answers) -> None:
    pool = ScorerPool([Scorer(), Scorer()], timeout_s=9.0)
    for number, given in enumerate([{"num_restarts": 2}, {"num_restarts": 1, "num_strays": 3}]):
        pool.submit(group_of(1), (ColumnsRef(None),))
        given_answers.answer = answer(number, **given)
        finish(pool, number, 1)
    assert pool.events == WorkerEvents(num_restarts=3, num_strays=3)


def test_tokens_that_were_lost_with_a_node_are_no_failure_of_the_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says so by an error that is of a task and of a lost object."""
    lost = ray.exceptions.ObjectLostError("id", None, "")
    error = ray.exceptions.RayTaskError("score", "traceback", lost).as_instanceof_cause()
    pool = ScorerPool([Scorer()], timeout_s=9.0)
    pool.submit(group_of(2), [])
    monkeypatch.setattr(scorer_pool.ray, "get", lambda ref: (_ for _ in ()).throw(error))
    with pytest.raises(TokensLostError, match="scoring of group 0 failed"):
        finish(pool, 0, 2)
    assert pool.num_restarts == 0


def test_a_scorer_is_not_judged_by_time_in_which_nobody_waited_for_it(
    given_answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller was stopped, or trained."""
    now, ended = [0.0], []
    monkeypatch.setattr(scorer_pool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pool = ScorerPool([Scorer()], timeout_s=60.0)
    monkeypatch.setattr(pool, "_end", lambda number, why: ended.append(number))
    monkeypatch.setattr(pool, "_heartbeats", [SimpleNamespace(process="known", missed=lambda: 0.0)])
    pool.submit(group_of(4), (ColumnsRef(None),))
    for _ in range(5):
        now[0] += 3600.0
        pool.check()
    assert not ended
    for _ in range(4):
        now[0] += 5.0
        pool.check()
    assert ended == [0]


@pytest.mark.parametrize(
    ("timeout_s", "silent_s", "why"),
    [(-1.0, 0.0, "finished none for -1 s, although"), (60.0, 61.0, "has not answered for 61 s")],
)
def test_a_scorer_that_hangs_is_named_with_its_node_and_leaves_its_stacks(
    given_answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    timeout_s: float,
    silent_s: float,
    why: str,
) -> None:
    killed = []

    def kill_on_nodes(processes: list[ProcessId], *, stacks: bool) -> tuple[str, ...]:
        killed.append((processes, stacks))
        return ("logs/stacks",)

    monkeypatch.setattr(heartbeat, "kill_on_nodes", kill_on_nodes)
    monkeypatch.setattr(Heartbeat, "missed", lambda beat: silent_s)
    pool = ScorerPool([Scorer()], timeout_s=timeout_s)
    for _ in range(2):
        pool.submit(group_of(1), (ColumnsRef(None),))
    process = ProcessId(node_id="n", pid=7, start_ticks=7, host="gpu-03")
    given_answers.answer = replace(answer(7), process=process)
    finish(pool, 0, 1)
    pool.check()
    assert killed == [([process], True)]
    assert caplog.messages[0].startswith(f"scorer 0 (process 7 on gpu-03) has 1 groups and {why}")
    assert caplog.messages[1] == "the stacks of scorer 0 are in logs/stacks"


def test_a_scorer_that_starts_is_judged_by_its_heartbeat_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ended = [0.0], []
    monkeypatch.setattr(scorer_pool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pool = ScorerPool([Scorer()], timeout_s=60.0)
    beat = SimpleNamespace(process=None, missed=lambda: 0.0)
    monkeypatch.setattr(pool, "_heartbeats", [beat])
    monkeypatch.setattr(pool, "_end", lambda number, why: ended.append(now[0]))
    pool.submit(group_of(1), (ColumnsRef(None),))
    for beat.process in (None, "known"):
        for _ in range(100):
            now[0] += 5.0
            pool.check()
    assert ended[0] == 100 * 5.0 + 65.0


def test_a_scorer_may_take_as_long_as_its_largest_group_by_one_worker_needs() -> None:
    assert scoring_timeout_s([1, 16, 4], reward_timeout_s=10.0) == 17 * 10.0 + 120.0
