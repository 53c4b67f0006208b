"""What the controller does with remote processes: SPMD calls with a deadline, groups through the pool."""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray

from launcher.endings.conclusion import termination_raises
from launcher.errors import Terminated
from megatron_rl.trainer import group as trainer_group
from megatron_rl.trainer.group import SpmdGroup, TrainerGroup
from megatron_rl.trainer.rank_watch import RankWatch
from rollout import progress
from rollout.engine.state import EngineProgress
from rollout.failures import DeadlineError, EnginesLostError, ProcessLostError, StepLostError
from rollout.planning.plan import GroupForecast, RolloutPlan
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.pool.engine_watch import EngineWatch
from rollout.processes import STACKS_SIGNAL, VARIABLE, ProcessId, redirect_output, write_stacks_on_signal
from rollout.types import FinishReason, Score, ScoreStatus
from tests.support.deadline import DEADLINE_S
from tests.support.scored_groups import scored_group, scorer_answer

pytestmark = pytest.mark.usefixtures("running")


@ray.remote(num_cpus=0)
class Rank:
    def __init__(self, rank, log=""):
        self.rank = rank
        if log:
            faulthandler.register(STACKS_SIGNAL, file=os.open(log, os.O_WRONLY | os.O_CREAT), all_threads=True)

    def process(self):
        return ProcessId.of_this_process(ray.get_runtime_context().get_node_id())

    def echo(self, value):
        return self.rank, value

    def sleep_if(self, rank):
        if rank == self.rank:
            time.sleep(60)

    def work_until(self, path):
        while not Path(path).exists():
            time.sleep(0.01)

    def begin_save(self, path, background):
        assert background
        self.saved = path

    def save_seconds(self):
        return 1.0 + self.rank if Path(self.saved, str(self.rank)).exists() else None

    def finish_save(self):
        return 1.0 + self.rank

    def raise_if(self, rank):
        if rank == self.rank:
            raise ValueError("the loss is a fish")

    def die_or_raise(self, rank):
        if rank == self.rank:
            time.sleep(0.5)
            os._exit(1)
        raise ConnectionError("connection closed by peer")


@ray.remote(num_cpus=0)
class MarkingRank:
    """A rank that leaves marks, as the trainer's do."""

    def __init__(self, rank):
        redirect_output()
        write_stacks_on_signal()
        progress.open_page()
        self.rank = rank

    def process(self):
        return ProcessId.of_this_process(ray.get_runtime_context().get_node_id())

    def mark(self):
        progress.mark("a micro batch")

    def hang(self, number):
        """One rank loops and holds the interpreter's lock nearly always, the others wait for it."""
        progress.begin("train")
        if self.rank == number:
            self.loop()
        progress.mark("gradients")
        time.sleep(600)

    def loop(self):
        while True:
            pass


def marking_ranks(log_dir, count):
    """Ranks with a log each, and their processes."""
    actors = [
        MarkingRank.options(runtime_env={"env_vars": {VARIABLE: f"{log_dir}/trainer-{rank}.log"}}).remote(rank)
        for rank in range(count)
    ]
    return actors, ray.get([actor.process.remote() for actor in actors])


@ray.remote(num_cpus=0)
class Engine:
    """Answers groups after a moment each; notes how many responses it held at once."""

    def __init__(self, answers_after_s=0.0, hangs=""):
        self.held = self.most = self.ended = 0
        self.hangs = hangs
        self.dead = ""
        self.calls = []
        self.answers_after_s = answers_after_s

    @ray.method(num_returns=2)
    async def generate_group(self, group):
        import asyncio

        self.calls.append(("generate", group.group_id))
        self.held += len(group.seeds)
        self.most = max(self.most, self.held)
        if self.hangs == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.sleep(3600 if self.hangs == "silent" else 2 if self.hangs == "paused" else 0.02)
        self.held -= len(group.seeds)
        self.ended += len(group.seeds)
        if group.prompt.ground_truth == "poison":
            raise RuntimeError("out of keys and values")
        made = scored_group(group.group_id)
        return made.summary, *made.columns

    async def ended_at_least(self, count):
        import asyncio

        while self.ended < count:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.answers_after_s)
        return self.ended

    async def start(self):
        return ProcessId.of_this_process(ray.get_runtime_context().get_node_id())

    async def progress(self):
        return EngineProgress(num_tokens=self.ended, can_sample=self.hangs != "paused")

    async def freeze(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    async def ping(self):
        pass

    async def hold(self):
        self.calls.append(("hold", None))
        self.fail_in("hold")

    async def release(self, group_ids):
        self.calls.append(("release", group_ids))
        self.fail_in("release")

    async def fault(self):
        return self.dead

    def fail_in(self, call):
        """As the product's, if the sampling process or the engine's own has died or hangs."""
        match self.hangs.removeprefix(f"{call}: "):
            case "its core is dead":
                self.dead = "vLLM's process has ended"
                raise ConnectionError("EngineCore encountered an issue")
            case "dead":
                os._exit(1)
            case "frozen since":
                os.kill(os.getpid(), signal.SIGSTOP)

    async def report(self):
        return self.most, self.calls


@ray.remote(num_cpus=0)
class Scorer:
    def alive(self):
        pass

    def score(self, group, columns):
        return scorer_answer(Score(reward=float(len(columns.response(s))), status=ScoreStatus.OK) for s in range(4))


BESIDE_WORK = "beside work"


@ray.remote(num_cpus=0, max_restarts=5, concurrency_groups={BESIDE_WORK: 1})
class BadScorer:
    """Hangs or dies with its second group, but only once."""

    def __init__(self, fault, folder):
        self.fault = fault
        self.first = folder / "first"
        self.num_calls = 0

    @ray.method(concurrency_group=BESIDE_WORK)
    def alive(self):
        return ProcessId.of_this_process(ray.get_runtime_context().get_node_id())

    @ray.method(max_task_retries=-1)
    def score(self, group, columns):
        self.num_calls += 1
        if self.num_calls == 2 and not self.first.exists():
            self.first.touch()
            if self.fault == "dies":
                time.sleep(1)  # the answer to the first call must have left the process, or it is repeated, too
                os._exit(1)
            time.sleep(3600)
        scores = (Score(reward=float(len(columns.response(s))), status=ScoreStatus.OK) for s in range(4))
        return scorer_answer(scores, ray.get_runtime_context().get_node_id())


@ray.remote(num_cpus=0, concurrency_groups={BESIDE_WORK: 1})
class HungScorer:
    @ray.method(concurrency_group=BESIDE_WORK)
    def alive(self):
        return ProcessId.of_this_process(ray.get_runtime_context().get_node_id())

    def score(self, group, columns):
        time.sleep(3600)


def group_of(*engines):
    return EngineGroup(engines, num_ranks=1)


def groups(count, **changes):
    return [replace(scored_group(number).group, **changes) for number in range(count)]


def test_an_spmd_call_returns_in_rank_order():
    group = SpmdGroup("trainer", [Rank.remote(rank) for rank in range(3)], timeout_s=60)
    assert group.call("echo", "x") == [(0, "x"), (1, "x"), (2, "x")]
    group.kill()


def test_a_late_rank_is_named_and_the_group_is_killed():
    group = SpmdGroup("trainer", [Rank.remote(rank) for rank in range(3)], timeout_s=60)
    group.call("echo", 0)
    with pytest.raises(DeadlineError, match=r"trainer\.sleep_if: rank\(s\) \[1\] of 3 had not returned after 1 s"):
        group.call("sleep_if", 1, timeout_s=1)
    with pytest.raises(ProcessLostError, match=r"trainer\.echo failed on rank"):
        group.call("echo", 0)


def test_late_ranks_write_their_stacks_and_have_ended_when_the_call_returns(tmp_path):
    logs = [tmp_path / f"rank-{rank}" for rank in range(2)]
    actors = [Rank.remote(rank, str(log)) for rank, log in enumerate(logs)]
    group = SpmdGroup("trainer", actors, timeout_s=60)
    group.learn_processes()
    processes = ray.get([actor.process.remote() for actor in actors])
    assert group.node_ids == [process.node_id for process in processes]
    with pytest.raises(DeadlineError):
        group.call("sleep_if", 1, timeout_s=1)
    assert "in sleep_if" in logs[1].read_text()
    assert not any(psutil.pid_exists(process.pid) for process in processes)


@pytest.mark.parametrize("fault", ["loop", "freeze"])
def test_a_rank_without_progress_is_named_with_its_last_mark_and_the_stacks_of_all_ranks_are_written(tmp_path, fault):
    actors, processes = marking_ranks(tmp_path, 2)
    group = SpmdGroup("trainer", actors, timeout_s=600)
    group.learn_processes(progress_timeout_s=1.0)
    calling = group.begin("hang", 1)
    if fault == "freeze":
        os.kill(processes[1].pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"trainer\.hang: rank\(s\) \[1\] of 2 made no progress for 1 s") as late:
        group.wait(calling, "hang")
    node = os.uname().nodename
    assert (late.value.place.ranks, late.value.place.node) == ((1,), node)
    assert f"rank 0 on {node} at `train: gradients` (sleeping)" in str(late.value)
    assert f"stacks are in {tmp_path / 'stacks'}" in str(late.value)
    first, second = sorted((tmp_path / "stacks" / node).iterdir())
    assert first.name.startswith("trainer-0-") and "in hang" in first.read_text()
    assert second.name.startswith("trainer-1-")
    assert ("in loop" if fault == "loop" else f"=== process {processes[1].pid}, stopped") in second.read_text()
    assert not any(psutil.pid_exists(process.pid) for process in processes)


def test_a_silent_rank_may_wait_for_a_peer_that_works_but_not_for_ever(tmp_path):
    actors, processes = marking_ranks(tmp_path, 2)
    now = [0.0]
    watch = RankWatch(processes, 20.0, clock=lambda: now[0])
    watch.begin()

    def looks(count, *, works):
        for _ in range(count):
            if works:
                ray.get(actors[0].mark.remote())
            now[0] += watch.look_every_s
            yield watch.hangs([0, 1])
            ray.wait([node.asked for node in watch._nodes if node.asked is not None], timeout=DEADLINE_S)

    assert not any(looks(12, works=True))
    assert list(looks(6, works=False)) == [False] * 5 + [True]
    assert watch.hangs([1]) is False  # it was asked a moment ago
    watch.begin()
    assert not any(looks(5, works=False))
    watch.close()


def test_a_reader_that_does_not_answer_is_replaced_and_says_nothing_about_its_ranks(tmp_path, caplog):
    actors, processes = marking_ranks(tmp_path, 1)
    now = [0.0]
    watch = RankWatch(processes, 20.0, clock=lambda: now[0])
    first = watch._nodes[0].reader
    ray.get(first.read.remote(processes))
    ray.kill(first, no_restart=True)
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:  # a killed actor answers until its process ends
            ray.get(first.read.remote(processes), timeout=DEADLINE_S)
    watch.begin()
    for _ in range(14):
        now[0] += watch.look_every_s
        assert not watch.hangs([0])
    assert watch._nodes[0].reader is not first and "it is replaced" in caplog.text
    ray.wait([watch._nodes[0].asked], timeout=DEADLINE_S)
    os.kill(processes[0].pid, signal.SIGSTOP)
    report = watch.report([0])  # asks anew
    assert report.suspects == (0,) and report.text.endswith("at `start` (stopped)")
    watch.close()
    del actors  # they live until here


def test_a_killed_group_has_ended_when_the_caller_continues():
    actors = [Rank.remote(rank) for rank in range(2)]
    group = SpmdGroup("trainer", actors, timeout_s=60)
    group.learn_processes()
    processes = ray.get([actor.process.remote() for actor in actors])
    group.kill_and_wait()
    assert not any(psutil.pid_exists(process.pid) for process in processes)


def test_a_save_is_written_when_every_rank_says_so_and_ranks_at_work_are_not_waited_for(tmp_path):
    group = TrainerGroup(
        SpmdGroup("trainer", [Rank.remote(rank) for rank in range(2)], timeout_s=60), data_ranks=[0, 1]
    )
    group.begin_save(str(tmp_path), background=True)
    assert not group.save_is_written(wait_s=DEADLINE_S)
    (tmp_path / "1").touch()
    assert not group.save_is_written(wait_s=DEADLINE_S)
    (tmp_path / "0").touch()
    work = group.ranks.begin("work_until", str(tmp_path / "end"))
    assert not group.save_is_written(wait_s=0.0)
    (tmp_path / "end").touch()
    group.ranks.wait(work, "work_until")
    assert group.save_is_written(wait_s=DEADLINE_S)
    assert group.finish_save() == 2.0
    group.kill()


def check_until(group: SpmdGroup, error: type[Exception]) -> Exception:
    """The error with which `check_idle` ends."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            group.check_idle()
        except error as found:
            return found
        time.sleep(0.02)
    raise AssertionError("nothing was noticed")


def test_an_idle_rank_that_dies_is_noticed_without_a_call(monkeypatch):
    monkeypatch.setattr(trainer_group, "LOOK_EVERY_S", 0.1)
    actors = [Rank.remote(rank) for rank in range(3)]
    group = SpmdGroup("trainer", actors, timeout_s=60)
    processes = ray.get([actor.process.remote() for actor in actors])
    group.check_idle()
    os.kill(processes[2].pid, signal.SIGKILL)
    lost = check_until(group, ProcessLostError)
    assert lost.place.ranks == (2,)
    for process in processes:  # the whole group ends; a process exists until its parent has noticed that
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(process.pid).wait(timeout=DEADLINE_S)


def test_an_idle_rank_that_is_frozen_is_named_and_the_group_is_killed(monkeypatch):
    monkeypatch.setattr(trainer_group, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(trainer_group, "IDLE_TIMEOUT_S", 2.0)
    actors = [Rank.remote(rank) for rank in range(2)]
    group = SpmdGroup("trainer", actors, timeout_s=60)
    group.learn_processes()
    processes = ray.get([actor.process.remote() for actor in actors])
    os.kill(processes[1].pid, signal.SIGSTOP)
    late = check_until(group, DeadlineError)
    assert (late.place.ranks, late.place.node) == ((1,), os.uname().nodename)
    assert "had not returned after 2 s" in str(late)
    assert not any(psutil.pid_exists(process.pid) for process in processes)


def test_ranks_that_live_are_asked_rarely(monkeypatch):
    asked = []
    group = SpmdGroup("trainer", [Rank.remote(0)], timeout_s=60)
    monkeypatch.setattr(group, "begin", lambda method: asked.append(method) or [])
    for _ in range(5):
        group.check_idle()
    assert asked == ["process"]
    group.kill()


def test_a_rank_that_raises_because_its_peer_died_is_not_blamed():
    group = SpmdGroup("trainer", [Rank.remote(rank) for rank in range(2)], timeout_s=60)
    group.call("echo", 0)
    with pytest.raises(ProcessLostError, match=r"rank 1 of 2: process \d+ ended") as lost:
        group.call("die_or_raise", 1)
    assert lost.value.place.ranks == (1,) and lost.value.place.node


def test_a_rank_that_raises_is_named_with_its_error():
    group = SpmdGroup("trainer", [Rank.remote(rank) for rank in range(2)], timeout_s=60)
    with pytest.raises(RuntimeError, match=r"(?s)raise_if failed on rank 1 of 2.*a fish"):
        group.call("raise_if", 1)


def test_every_group_comes_back_once_scored_in_the_order_of_admission():
    engines = [Engine.remote() for _ in range(2)]
    pool = EnginePool(group_of(*engines), [Scorer.remote(), Scorer.remote()], seats_per_engine=8)
    seen = []
    pool.admit(groups(12, purpose="train", step=5))
    pool.check_integrity()
    taken = pool.take("train", 5, progress=lambda done, total: seen.append((done, total)))
    assert [scored.group.group_id for scored in taken] == list(range(12))
    for scored in taken:
        assert scored.rewards == tuple(float(n) for n in scored.summary.lengths)
    assert seen[-1] == (12, 12)
    assert seen == sorted(seen)
    assert pool.take("train", 5) == []
    reports = ray.get([engine.report.remote() for engine in engines])
    assert all(most <= 8 for most, _ in reports)
    assert all(calls for _, calls in reports)


def test_other_purposes_and_steps_stay_in_the_pool():
    pool = EnginePool(group_of(Engine.remote()), [Scorer.remote()], seats_per_engine=4)
    first, second = groups(2, step=0), [replace(group, step=1, group_id=group.group_id + 2) for group in groups(2)]
    pool.admit(first + second)
    assert len(pool.take("train", 1)) == 2
    assert len(pool.take("train", 0)) == 2


def test_a_deterministic_step_is_handed_over_whole_before_it_is_sampled():
    engine = Engine.remote()
    pool = EnginePool(group_of(engine), [Scorer.remote()], seats_per_engine=4, whole_step=True)
    pool.admit(groups(6, step=0))
    assert len(pool.take("train", 0)) == 6
    _, calls = ray.get(engine.report.remote())
    assert calls[0] == ("hold", None)
    assert ("release", list(range(6))) in calls
    assert sorted(group_id for name, group_id in calls if name == "generate") == list(range(6))


@pytest.mark.parametrize("call", ["hold", "release"])
@pytest.mark.parametrize(
    ("fault", "why"),
    [("its core is dead", "vLLM's process"), ("dead", "ended"), ("frozen since", "had not finished")],
)
def test_a_deterministic_step_is_lost_if_its_engine_dies_before_it_samples(call, fault, why):
    engines = group_of(Engine.remote(hangs=f"{call}: {fault}"))
    engines.finish_start(engines.begin_start(), timeout_s=60)
    watch = EngineWatch(engines, timeout_s=3.0)
    pool = EnginePool(engines, [Scorer.remote()], seats_per_engine=4, whole_step=True, watch=watch)
    with pytest.raises(StepLostError, match=f"engine 0 died.*{why}"):
        pool.admit(groups(2, step=0))
    assert engines.lost == (0,)


def test_an_engine_that_fails_is_named_with_its_group():
    pool = EnginePool(group_of(Engine.remote()), [Scorer.remote()], seats_per_engine=4)
    (group,) = groups(1)
    pool.admit([replace(group, prompt=replace(group.prompt, ground_truth="poison"))])
    with pytest.raises(RuntimeError, match=r"(?s)engine 0: group 0 failed.*out of keys and values"):
        pool.take("train", 0)


def test_a_second_pool_of_an_engine_that_has_sampled_is_refused():
    engines = group_of(Engine.remote())
    EnginePool(engines, [Scorer.remote()], seats_per_engine=12).admit(groups(3))
    ray.get(engines.actors[0].ended_at_least.remote(12))
    pool = EnginePool(engines, [Scorer.remote()], seats_per_engine=4)
    pool.admit(groups(3))
    with pytest.raises(RuntimeError, match=r"engine 0 has ended \d+ responses, of which this pool began (4|8|12):"):
        pool.take("train", 0)


def wait_until_ended(process):
    deadline = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(process.pid) and psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("hangs", ["silent", "frozen"])
def test_an_engine_that_emits_nothing_is_ended_and_its_groups_continue_elsewhere(hangs):
    engines = group_of(Engine.remote(hangs=hangs), Engine.remote())
    engines.finish_start(engines.begin_start(), timeout_s=60)
    process = engines._processes[0]
    watch = EngineWatch(engines, timeout_s=1.0)
    pool = EnginePool(engines, [Scorer.remote()], seats_per_engine=8, watch=watch)
    pool.admit(groups(6))
    assert len(pool.take("train", 0)) == 6
    assert engines.lost == (0,) and pool.num_hung == 1 and pool.num_reissued == 2
    named = f"engine 0 (process {process.pid} on {os.uname().nodename})"
    assert engines.loss_reason(0).startswith(f"{named} emitted no token for 1 s")
    wait_until_ended(process)


def test_a_frozen_engine_that_does_not_answer_is_ended():
    engines = group_of(Engine.remote(), Engine.remote())
    engines.finish_start(engines.begin_start(), timeout_s=60)
    engines.actors[1].freeze.remote()
    engines.end_silent(timeout_s=2)
    assert engines.lost == (1,) and engines.num_hung == 1
    assert "did not answer for 2 s and was ended" in engines.loss_reason(1)
    wait_until_ended(engines._processes[1])


def test_an_engine_that_may_not_sample_is_not_ended():
    engines = group_of(Engine.remote(hangs="paused"))
    engines.finish_start(engines.begin_start(), timeout_s=60)
    pool = EnginePool(engines, [Scorer.remote()], seats_per_engine=8, watch=EngineWatch(engines, timeout_s=0.5))
    pool.admit(groups(2))
    assert len(pool.take("train", 0)) == 2 and engines.lost == ()


def test_a_scorer_that_hangs_is_named():
    engines = group_of(Engine.remote())
    engines.finish_start(engines.begin_start(), timeout_s=60)
    watch = EngineWatch(engines, timeout_s=4)
    scorer = Scorer.remote()
    ray.get(scorer.__ray_ready__.remote())  # its start is not part of the two seconds
    pool = EnginePool(engines, [scorer, HungScorer.remote()], seats_per_engine=8, watch=watch, scoring_timeout_s=2)
    pool.admit(groups(2))
    with pytest.raises(ProcessLostError, match=r"scoring of group \d failed") as lost:
        pool.take("train", 0)
    assert lost.value.place.role == "scorer" and lost.value.place.ranks == (1,)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_scorer_that_dies_or_hangs_is_restarted_and_scores_its_groups_again(tmp_path, fault):
    engines = group_of(Engine.remote())
    watch = EngineWatch(engines, timeout_s=600)
    pool = EnginePool(
        engines, [BadScorer.remote(fault, tmp_path)], seats_per_engine=8, watch=watch, scoring_timeout_s=2
    )
    pool.admit(groups(5))
    taken = pool.take("train", 0)
    assert [scored.group.group_id for scored in taken] == list(range(5))
    assert all(scored.rewards == tuple(float(n) for n in scored.summary.lengths) for scored in taken)
    assert pool.num_scorer_restarts >= 1  # a restart may take longer than the limit of this test


class Batches:
    """Trains on what is complete first, so many groups at a time; notes what it was told."""

    def __init__(self, size):
        self.size = size
        self.told = []
        self.complete = []

    def started(self, group_id):
        self.told.append(("started", group_id))

    def completed(self, scored):
        self.told.append(("completed", scored.group.group_id))
        self.complete.append(scored.group.group_id)

    def progress(self, step):
        return min(len(self.complete), self.size), self.size

    def batch(self, step):
        if len(self.complete) < self.size:
            return None
        chosen, self.complete = self.complete[: self.size], self.complete[self.size :]
        return chosen


def test_groups_leave_in_the_batches_that_somebody_else_makes_up():
    batches = Batches(5)
    engines = group_of(*(Engine.remote() for _ in range(2)))
    pool = EnginePool(engines, [Scorer.remote()], seats_per_engine=8, batches=batches)
    admitted = groups(15)
    pool.admit(admitted)
    taken = [scored.group.group_id for step in range(3) for scored in pool.take_batch(step)]
    assert sorted(taken) == list(range(15))
    for group_id in range(15):
        assert batches.told.index(("started", group_id)) < batches.told.index(("completed", group_id))
    pool.check_integrity()


def test_a_plan_says_which_engine_starts_what_and_in_which_order():
    engines = [Engine.remote() for _ in range(2)]
    pool = EnginePool(group_of(*engines), [Scorer.remote()], seats_per_engine=4)
    admitted = groups(6, step=0)
    forecasts = [GroupForecast(group_id=g.group_id, step=0, num_responses=4, tokens=9.0) for g in admitted]
    queues = (tuple(forecasts[i] for i in (5, 0)), tuple(forecasts[i] for i in (4, 3, 2, 1)))
    pool.admit(admitted, RolloutPlan(queues=queues, shares_work=False))
    assert len(pool.take("train", 0)) == 6
    calls = [[group_id for name, group_id in calls if name == "generate"] for _, calls in
             ray.get([engine.report.remote() for engine in engines])]  # fmt: skip
    assert calls == [[5, 0], [4, 3, 2, 1]]


@pytest.mark.parametrize("answers_after_s", [0.0, 0.5], ids=["at_once", "when_all_are_scored"])
def test_while_the_caller_does_something_else_groups_are_started_and_scored(answers_after_s):
    """Also where an engine says that it has room after the last of its groups was scored."""
    batches = Batches(12)
    engines = group_of(Engine.remote(answers_after_s))
    pool = EnginePool(engines, [Scorer.remote()], seats_per_engine=4, batches=batches)
    pool.admit(groups(12))
    with pool.run_in_background():
        deadline = time.monotonic() + 60
        while len(batches.complete) < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(batches.complete) == 12
    assert len(pool.take_batch(0)) == 12


def test_what_fails_aside_is_told_when_the_caller_comes_back():
    engine = Engine.remote()
    ray.get(engine.report.remote())  # it is there
    pool = EnginePool(group_of(engine), [Scorer.remote()], seats_per_engine=4)
    (group,) = groups(1)
    pool.admit([replace(group, prompt=replace(group.prompt, ground_truth="poison"))])
    with pytest.raises(RuntimeError, match=r"engine 0: group 0 failed"), pool.run_in_background():
        time.sleep(3.0)


def test_a_batch_that_nothing_can_complete_is_said_and_not_waited_for():
    pool = EnginePool(group_of(Engine.remote()), [Scorer.remote()], seats_per_engine=4, batches=Batches(2))
    pool.admit(groups(1))
    with pytest.raises(RuntimeError, match="nothing is being sampled"):
        pool.take_batch(0)


@ray.remote(num_cpus=0)
class Mortal:
    """An engine that dies at its `lives`-th group: with its actor, or only vLLM's process inside it."""

    def __init__(self, lives, with_actor):
        self.lives, self.with_actor = lives, with_actor
        self.ended = 0
        self.begun = {}

    @ray.method(num_returns=2)
    async def generate_group(self, group, summary=None, columns=None):
        import asyncio
        import os

        self.lives -= 1
        self.begun[group.group_id] = None if summary is None else (summary.lengths, columns.response_ids.tolist())
        await asyncio.sleep(0.02)
        made = scored_group(group.group_id)
        if self.lives <= 0:
            if self.with_actor:
                os._exit(1)
            reasons = (FinishReason.STOP, *[FinishReason.ABORT] * 3)
            return replace(made.summary, finish_reasons=reasons, fault="the core died"), *made.columns
        self.ended += len(group.seeds)
        return made.summary, *made.columns

    async def ended_at_least(self, count):
        import asyncio

        while self.ended < count:
            await asyncio.sleep(0.001)
        return self.ended

    def what_was_begun(self):
        return self.begun


@pytest.mark.parametrize("with_actor", [True, False])
def test_groups_of_an_engine_that_dies_go_on_elsewhere_and_each_comes_back_once(with_actor):
    survivor = Mortal.remote(1000, with_actor)
    engines = group_of(Mortal.remote(2, with_actor), survivor)  # the first plan gives each two groups
    ray.get([actor.what_was_begun.remote() for actor in engines.actors])  # both are there
    pool = EnginePool(engines, [Scorer.remote()], seats_per_engine=8)
    admitted = groups(16, step=0)
    pool.admit(admitted)
    taken = pool.take("train", 0)
    pool.check_integrity()
    assert [scored.group.group_id for scored in taken] == list(range(16))
    assert engines.lost == (0,) and engines.loss_reason(0)
    assert pool.num_reissued > 0
    begun = {group_id: had for group_id, had in ray.get(survivor.what_was_begun.remote()).items() if had is not None}
    assert bool(begun) is not with_actor  # what an actor had is gone with it
    for group_id, (lengths, ids) in begun.items():
        made = scored_group(group_id)
        assert (lengths, ids) == (made.summary.lengths, made.columns[0].response_ids.tolist())


def test_where_no_engine_is_left_one_is_brought_and_nothing_is_lost():
    engines = group_of(Mortal.remote(3, True))
    brought = []

    def revive():
        brought.append(engines.loss_reason(0))
        engines.replace(0, group_of(Mortal.remote(1000, True)))

    pool = EnginePool(engines, [Scorer.remote()], seats_per_engine=8, revive=revive)
    pool.admit(groups(8, step=0))
    assert [scored.group.group_id for scored in pool.take("train", 0)] == list(range(8))
    assert len(brought) == 1 and engines.lost == ()
    pool.check_integrity()


def until_dead(engine):
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(engine.what_was_begun.remote())


def test_an_engine_that_was_replaced_before_the_pool_noticed_its_death_is_not_lost():
    first = Mortal.remote(2, True)  # has seats for two groups
    engines = group_of(first)
    pool = EnginePool(engines, [Scorer.remote()], seats_per_engine=8)
    pool.admit(groups(8, step=0))
    until_dead(first)
    engines.mark_lost(0, "silent")
    engines.replace(0, group_of(Mortal.remote(1000, True)))
    assert [scored.group.group_id for scored in pool.take("train", 0)] == list(range(8))
    assert engines.lost == () and pool.num_reissued > 0
    pool.check_integrity()


def test_without_anybody_to_bring_an_engine_the_end_of_the_last_one_is_an_error():
    pool = EnginePool(group_of(Mortal.remote(1, True)), [Scorer.remote()], seats_per_engine=8)
    pool.admit(groups(2, step=0))
    with pytest.raises(EnginesLostError, match="2 groups wait"):
        pool.take("train", 0)


def test_a_termination_ends_a_wait_for_ray_at_once():
    rank = Rank.remote(0)
    ray.get(rank.echo.remote(0))
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(Terminated), termination_raises():
        ray.get(rank.sleep_if.remote(0))
    assert time.monotonic() - began < 30  # the call takes 60 s
    ray.kill(rank)
