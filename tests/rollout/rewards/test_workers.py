"""Reward workers: calls side by side, limits, and what is left when a call or a worker has ended. No Ray."""

import asyncio
import heapq
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rollout.config import RewardConfig
from rollout.failures import ProcessLostError, RewardBrokenError
from rollout.rewards import code
from rollout.rewards import workers as workers_module
from rollout.rewards.call import RewardOutcome, RewardRequest
from rollout.rewards.call_queue import Call
from rollout.rewards.frames import Ended
from rollout.rewards.worker import WorkerLimits
from rollout.rewards.worker_server import clean_environment, start_server
from rollout.rewards.workers import RewardWorkers, _Worker
from rollout.types import WorkerEvents
from tests.support.deadline import DEADLINE_S

FUNCTIONS = "tests.support.reward_functions"


@pytest.fixture
def workers_of():
    made = []
    with asyncio.Runner() as loop:

        def start(function: str = f"{FUNCTIONS}.moody", **config: object) -> "Calls":
            workers = RewardWorkers(RewardConfig(function=function, **config))
            loop.run(workers.start())
            made.append(workers)
            return Calls(loop, workers, function)

        yield start
        for workers in made:
            loop.run(workers.close())


class Calls:
    """Reward workers in an event loop of their own."""

    def __init__(self, loop: asyncio.Runner, workers: RewardWorkers, function: str) -> None:
        self.loop, self.workers, self.function = loop, workers, function

    def __call__(self, texts: Iterable[str]) -> list[RewardOutcome]:
        async def call() -> list[RewardOutcome]:
            return list(await asyncio.gather(*[self.workers.submit(self.request(text)) for text in texts]))

        return self.loop.run(call())

    def request(self, text: str) -> RewardRequest:
        return RewardRequest(
            function=self.function, data_source="", solution_str=text, ground_truth="", extra_info_json="null"
        )

    def running(self) -> list[Call]:
        return [call for worker in self.workers._workers.values() for call in worker.calls.values()]

    @property
    def server(self) -> psutil.Process:
        assert self.workers._server is not None
        return psutil.Process(self.workers._server.pid)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def written(file: Path) -> str:
    """What a call has written into a file, which is removed."""
    deadline = time.monotonic() + DEADLINE_S
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    text = file.read_text()
    file.unlink()
    return text


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while _lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_leads_a_session_without_core_dumps_and_without_ray(workers_of):
    calls = workers_of()
    assert [outcome.reward for outcome in calls(["group", "cores", "ray"])] == [1.0, 0.0, 0.0]


def test_a_worker_has_only_the_named_secrets(workers_of, monkeypatch):
    secrets = ("RAY_AUTH_TOKEN", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "JUDGE_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    calls = workers_of(environment=("JUDGE_KEY",))
    found = calls([f"environment {name}" for name in (*secrets, "PATH")])
    assert [outcome.reward for outcome in found] == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_clean_environment_keeps_paths_threads_and_what_is_named():
    given = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "WANDB_API_KEY": "a", "JUDGE_KEY": "b", "RAY_ADDRESS": "c"}
    assert clean_environment(given, ["JUDGE_KEY"]) == {"PATH": "/bin", "OMP_NUM_THREADS": "1", "JUDGE_KEY": "b"}


def test_at_the_time_limit_the_whole_group_is_killed(workers_of, tmp_path):
    calls = workers_of(timeout_s=2.0)
    (late,) = calls([f"child {tmp_path / 'pid'}"])
    assert late.is_late and late.error == "over the limit of 2.0 s"
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_a_daemon_that_outlives_its_call_is_killed_before_the_next_one(workers_of, tmp_path):
    calls = workers_of(timeout_s=DEADLINE_S)
    (left,) = calls([f"leave {tmp_path / 'pid'}"])
    daemon = int((tmp_path / "pid").read_text())
    assert left.reward == 1.0 and not psutil.pid_exists(daemon)
    assert calls.workers.take_events() == WorkerEvents(num_strays=1)


def test_a_daemon_of_a_killed_worker_is_killed(workers_of, tmp_path):
    calls = workers_of(timeout_s=DEADLINE_S)
    daemons = []

    async def kill_each() -> RewardOutcome:
        outcome = calls.workers.submit(calls.request(f"leave and hang {tmp_path / 'pid'}"))
        for _ in range(2):  # the call runs again once
            daemons.append(int(await written(tmp_path / "pid")))
            max(calls.server.children(), key=psutil.Process.create_time).kill()
        return await outcome

    assert calls.loop.run(kill_each()).error == "its process died: killed by SIGKILL"
    for daemon in daemons:
        wait_until_gone(daemon)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_call_whose_worker_is_killed_or_frozen_from_outside_runs_again(workers_of, tmp_path, number):
    calls = workers_of(timeout_s=5.0)

    async def disturb() -> RewardOutcome:
        outcome = calls.workers.submit(calls.request(f"note and wait {tmp_path / 'pid'} {tmp_path / 'end'}"))
        os.kill(int(await written(tmp_path / "pid")), number)
        (tmp_path / "end").touch()
        return await outcome

    assert calls.loop.run(disturb()).reward == 1.0
    assert calls.workers.take_events() == WorkerEvents(num_restarts=1, num_repeated=1)


STOPPED_S = 4.0
"""Longer than a pause that the scorer's clock counts, and than the time limit of these calls."""


def test_a_call_is_not_late_by_time_in_which_the_scorer_was_stopped(workers_of, tmp_path):
    """The answer lies unread when the scorer goes on."""
    calls = workers_of(timeout_s=3.0)

    async def score() -> RewardOutcome:
        outcome = calls.workers.submit(calls.request(f"note and wait {tmp_path / 'pid'} {tmp_path / 'end'}"))
        await written(tmp_path / "pid")
        (tmp_path / "end").touch()
        time.sleep(STOPPED_S)  # the event loop stands still, as if its process was stopped
        return await outcome

    assert calls.loop.run(score()).reward == 1.0
    assert calls.workers.take_events() == WorkerEvents()


def test_a_call_that_goes_on_after_a_stop_of_the_whole_job_has_the_rest_of_its_time(workers_of, tmp_path):
    calls = workers_of(timeout_s=3.0)

    async def score() -> tuple[RewardOutcome, RewardOutcome]:
        outcome = calls.workers.submit(calls.request(f"note and wait {tmp_path / 'pid'} {tmp_path / 'end'}"))
        stop(int(await written(tmp_path / "pid")))
        await asyncio.sleep(0.5)
        (tmp_path / "end").touch()
        return await outcome, await calls.workers.submit(calls.request("hang"))

    ended, hung = calls.loop.run(score())
    assert ended.reward == 1.0 and hung.error == "over the limit of 3.0 s"
    assert calls.workers.take_events() == WorkerEvents(num_restarts=1)


def test_an_asynchronous_call_that_a_stop_of_the_whole_job_made_late_runs_again(workers_of, tmp_path):
    calls = workers_of(f"{FUNCTIONS}.patient", timeout_s=3.0)

    async def score() -> RewardOutcome:
        outcome = calls.workers.submit(calls.request(f"meet {tmp_path} 2 one"))
        while not (tmp_path / "one").exists():
            await asyncio.sleep(0.01)
        (worker,) = [worker for worker in calls.workers._workers.values() if worker.calls]
        stop(worker.pid)
        deadline = time.monotonic() + DEADLINE_S
        while not calls.workers._num_repeated:
            assert time.monotonic() < deadline and not outcome.done()
            await asyncio.sleep(0.01)
        (tmp_path / "other").touch()
        return await outcome

    assert calls.loop.run(score()).reward == 1.0
    assert calls.workers.take_events() == WorkerEvents(num_repeated=1)


def stop(worker: int) -> None:
    """The worker and this process, which is the scorer, stand still for a while."""
    os.kill(worker, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(worker, signal.SIGCONT)


@pytest.mark.parametrize("text", ["burn", "burn below"])
def test_a_call_over_its_cpu_seconds_is_late_and_the_next_call_has_all_of_its_own(workers_of, text):
    calls = workers_of(cpu_s=1.0, timeout_s=DEADLINE_S)
    outcomes = calls([text, "fine", text])
    assert [(outcome.error, outcome.is_late) for outcome in outcomes] == [
        ("over the limit of 1.0 CPU seconds", True),
        ("", False),
        ("over the limit of 1.0 CPU seconds", True),
    ]


def test_a_cpu_limit_that_the_reward_finds_too_low_is_refused(workers_of):
    with pytest.raises(ValueError, match=r"`reward\.cpu_s` = 30\.0: .* at least 90, .*; set it to 120"):
        workers_of("rollout.rewards.code.compute_score", cpu_s=30.0, timeout_s=120.0)


BUSY = "import os\nfor _ in range(3):\n    if os.fork() == 0:\n        break\nwhile True:\n    pass"
BUSY_FOR_A_WHILE = "import time\nwhile time.process_time() < 0.2:\n    pass\nprint(1)"


def scores_by_twenty_tests(solution_str, **_):
    code.TOTAL_S = DEADLINE_S
    truth = {"inputs": [""] * 20, "outputs": ["1"] * 20}
    return code.compute_score("", f"```\n{solution_str}\n```", json.dumps(truth), {"time_limit_s": 600})


def scores_within_two_cpu_seconds(**given):
    code.TOTAL_CPU_S = 2.0
    return scores_by_twenty_tests(**given)


@pytest.mark.sandbox
@pytest.mark.parametrize("program", [BUSY, BUSY_FOR_A_WHILE])
def test_a_program_that_burns_more_than_its_share_scores_zero_before_its_call_is_late(workers_of, program):
    calls = workers_of(f"{__name__}.scores_within_two_cpu_seconds", cpu_s=30.0, timeout_s=DEADLINE_S)
    (outcome,) = calls([program])
    assert (outcome.error, outcome.reward, dict(outcome.details)["timed_out"]) == ("", 0.0, 1.0)


@pytest.mark.sandbox
def test_a_program_may_have_more_tests_than_its_call_may_have_processes(workers_of):
    calls = workers_of(f"{__name__}.scores_by_twenty_tests", max_processes=4, timeout_s=DEADLINE_S)
    (outcome,) = calls(["print(1)"])
    assert (outcome.error, outcome.reward) == ("", 1.0)


def test_a_call_with_too_many_processes_fails_and_they_are_killed(workers_of):
    calls = workers_of(max_processes=4, timeout_s=DEADLINE_S)
    over, fine = calls(["many 5", "fine"])
    assert (over.error, over.is_late) == ("over the limit of 4 processes", False) and fine.reward == 1.0
    for child in calls.server.children(recursive=True):  # those that were killed may need a moment to end
        with suppress(psutil.NoSuchProcess):
            if child.name() == "sleep":
                wait_until_gone(child.pid)


def test_so_many_calls_run_at_a_time_as_there_are_workers(workers_of, tmp_path):
    calls = workers_of(num_workers=3, timeout_s=DEADLINE_S)
    files = [tmp_path / str(number) for number in range(2)]

    async def order() -> list[bool]:
        held = [calls.workers.submit(calls.request(f"until {file}")) for file in files]
        await calls.workers.submit(calls.request("fine"))  # by the third worker
        done = [outcome.done() for outcome in held]
        for file in files:
            file.touch()
        await asyncio.gather(*held)
        return done

    assert calls.loop.run(order()) == [False, False]


def test_a_worker_awaits_many_calls_of_an_asynchronous_function(workers_of, tmp_path):
    calls = workers_of(f"{FUNCTIONS}.patient", async_concurrency=8, timeout_s=DEADLINE_S)
    outcomes = calls([f"meet {tmp_path} 8 {number}" for number in range(8)])
    assert {outcome.reward for outcome in outcomes} == {1.0}
    assert len({dict(outcome.details)["pid"] for outcome in outcomes}) == 1


def test_a_late_asynchronous_call_is_cancelled_and_its_worker_goes_on(workers_of):
    calls = workers_of(f"{FUNCTIONS}.patient", timeout_s=1.0)
    late, fine, bad = calls(["hang", "fine", "exit"])
    assert late.is_late and late.error == "over the limit of 1.0 s" and bad.error == "SystemExit: 3"
    assert fine.reward == 1.0 and calls.workers.take_events() == WorkerEvents()


@pytest.mark.parametrize(("text", "error"), [("block", "over the limit of"), ("die", "its process died: exit code 3")])
def test_calls_that_share_a_worker_with_the_culprit_are_repeated(workers_of, monkeypatch, text, error):
    monkeypatch.setattr(workers_module, "GRACE_S", 0.5)
    calls = workers_of(f"{FUNCTIONS}.patient", timeout_s=1.0)
    outcomes = calls(["fine", "hang", text, "fine"])
    assert [outcome.error.startswith(error) for outcome in outcomes] == [False, text == "block", True, False]
    assert outcomes[1].is_late and [outcomes[0].reward, outcomes[3].reward] == [1.0, 1.0]
    # shared, then alone; on a busy machine the worker of the call that hangs may be too slow to cancel it
    assert calls.workers.take_events().num_restarts in (2, 3)


def test_a_call_is_not_blamed_for_a_death_of_which_only_its_own_begin_was_read(workers_of, tmp_path):
    """The scorer has read nothing of the culprit when a write to the dead worker fails."""
    calls = workers_of(f"{FUNCTIONS}.patient", timeout_s=DEADLINE_S)

    async def crash() -> list[RewardOutcome]:
        innocent = calls.workers.submit(calls.request(f"meet {tmp_path} 2 innocent"))
        while not any(call.has_begun for call in calls.running()):
            await asyncio.sleep(0.01)
        (worker,) = calls.server.children()
        culprit = calls.workers.submit(calls.request("die"))
        wait_until_gone(worker.pid)
        late = calls.workers.submit(calls.request("fine"))
        (tmp_path / "other").touch()
        return await asyncio.gather(innocent, culprit, late)

    outcomes = calls.loop.run(crash())
    assert [outcome.error for outcome in outcomes] == ["", "its process died: exit code 3", ""]


def answers_twice(solution_str, **_):
    if solution_str == "wait":
        time.sleep(2.0)
    elif os.fork():
        time.sleep(0.5)  # so that the other process answers first, and this one within the next call
    return 1.0


def test_a_function_that_forks_and_returns_twice_costs_a_worker_and_no_call(workers_of):
    calls = workers_of(f"{__name__}.answers_twice", timeout_s=DEADLINE_S)
    assert [outcome.reward for outcome in calls(["fork", "wait"])] == [1.0] * 2


def test_a_task_that_fails_ends_all_calls(workers_of, tmp_path, monkeypatch):
    def fail(pid: int) -> list[int]:
        raise OSError(24, "Too many open files")

    calls = workers_of(timeout_s=DEADLINE_S)
    monkeypatch.setattr(workers_module, "descendants", fail)
    with pytest.raises(ProcessLostError, match="a task beside the reward workers failed: OSError: "):
        calls([f"until {tmp_path / 'never'}"])


def test_every_signal_has_a_text():
    texts = [workers_module._exit_text(-number) for number in (9, 40)]
    assert texts == ["killed by SIGKILL", "killed by signal 40"]


def test_a_worker_starts_although_the_server_has_not_read_the_commands_before():
    async def check() -> None:
        workers = RewardWorkers(RewardConfig(function=f"{FUNCTIONS}.moody"))
        workers._control, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        workers._control.setblocking(False)
        with workers._control, server:
            with suppress(BlockingIOError):
                while True:
                    workers._control.send(b"end 0")
            workers._start_worker()
            ending = _Worker(number=7, channel=None, exited=None)
            workers._workers[7] = ending
            workers._command_end(ending)
            server.setblocking(False)
            commands: list[bytes] = []
            while len(set(commands)) < 3:
                try:
                    commands.append(server.recv(1 << 16))
                except BlockingIOError:
                    await asyncio.sleep(0.01)
        assert {command.split()[0] for command in commands} == {b"end", b"start"} and b"end 7" in commands
        for task in workers._tasks:
            task.cancel()

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


class Dispatch:
    """The rule by which workers receive calls, without processes; numbers of calls ascend with their age."""

    def __init__(self, num_workers: int, per_worker: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.workers = RewardWorkers(RewardConfig(function=f"{FUNCTIONS}.patient"))
        self.workers._per_worker = per_worker
        for number in range(num_workers):
            worker = _Worker(number=number, channel=None, exited=None, writer=Unsent(), pid=os.getpid())
            self.workers._workers[number] = worker

    def add(self, *numbers: int, alone: bool = False) -> None:
        for number in numbers:
            call = Call(number=number, request=None, outcome=self.loop.create_future())
            self.workers._queue.add(call, alone=alone)
        self.workers._dispatch()

    def end(self, number: int) -> None:
        (worker,) = (each for each in self.workers._workers.values() if number in each.calls)
        self.workers._ended(worker, Ended(number=number, outcome=RewardOutcome(reward=1.0), num_strays=0))
        self.workers._dispatch()

    def running(self) -> list[list[int]]:
        return [list(worker.calls) for worker in self.workers._workers.values()]


class Unsent:
    def write(self, data: bytes) -> None:
        pass


def test_the_oldest_call_gets_a_worker_of_its_own_although_younger_ones_arrive():
    async def check() -> None:
        calls = Dispatch(num_workers=2, per_worker=4)
        calls.add(10, 11)
        calls.add(0, alone=True)
        calls.add(12, 13)
        assert calls.running() == [[10], [11, 12, 13]]
        calls.end(10)
        assert calls.running() == [[0], [11, 12, 13]]
        calls.add(14, 15)
        assert calls.running() == [[0], [11, 12, 13, 14]]
        calls.end(0)
        assert calls.running() == [[15], [11, 12, 13, 14]]

    asyncio.run(check())


def test_one_worker_at_a_time_is_kept_for_calls_that_run_alone():
    async def check() -> None:
        calls = Dispatch(num_workers=3, per_worker=4)
        calls.add(10, 11, 12)
        calls.add(0, 1, alone=True)
        calls.end(11)
        calls.add(13, 14)
        assert calls.running() == [[10, 13], [0], [12, 14]]
        calls.end(0)
        assert calls.running() == [[10, 13], [1], [12, 14]]

    asyncio.run(check())


def test_a_call_that_runs_alone_waits_for_older_ones_that_may_share_a_worker():
    async def check() -> None:
        calls = Dispatch(num_workers=1, per_worker=2)
        calls.add(10, 11, 12)
        calls.add(20, alone=True)
        calls.add(30)
        calls.end(10)
        calls.end(11)
        assert calls.running() == [[12]], "12 is older than 20, and 30 is younger"
        calls.end(12)
        assert calls.running() == [[20]]

    asyncio.run(check())


MOST_S = 8.0
"""Of a call in the next test."""
ASKED_S = 60.0
"""When the call that must run alone arrives."""


@pytest.mark.parametrize("seed", range(3))
def test_the_oldest_call_waits_no_longer_than_the_calls_that_had_begun_before_it(seed):
    """Under arrivals of which no worker becomes empty by chance, and calls of very different lengths."""
    rng = random.Random(seed)

    async def waited_s() -> float:
        calls = Dispatch(num_workers=4, per_worker=16)
        begun: set[int] = set()
        events = [(rng.uniform(0.0, 600.0), "arrives", number) for number in range(1, 4800)]
        events.append((ASKED_S, "arrives", 0))
        heapq.heapify(events)
        while 0 not in begun and events:
            now_s, kind, number = heapq.heappop(events)
            calls.end(number) if kind == "ends" else calls.add(number, alone=number == 0)
            for each in {each for worker in calls.running() for each in worker} - begun:
                begun.add(each)
                heapq.heappush(events, (now_s + rng.uniform(0.1, MOST_S), "ends", each))
        return now_s - ASKED_S

    assert asyncio.run(waited_s()) <= MOST_S


def test_the_server_ends_with_its_scorer_and_takes_everything_along(workers_of, tmp_path):
    calls = workers_of(timeout_s=DEADLINE_S)

    async def abandon() -> list[int]:
        outcome = calls.workers.submit(calls.request(f"child {tmp_path / 'pid'}"))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        pids = [process.pid for process in (calls.server, *calls.server.children(recursive=True))]
        await calls.workers.close()  # closes the control socket, as the scorer's death does
        assert outcome.cancelled()
        return pids

    pids = calls.loop.run(abandon())
    assert len(pids) == 3
    for pid in pids:
        wait_until_gone(pid)


def test_a_time_limit_that_passes_while_the_workers_are_closed_is_no_error(workers_of, tmp_path, monkeypatch):
    calls = workers_of(timeout_s=1.0)
    failures: list[object] = []

    async def close() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        outcome = calls.workers.submit(calls.request(f"until {tmp_path / 'never'}"))
        while not calls.running():
            await asyncio.sleep(0.01)
        server = calls.workers._server
        wait = server.wait
        monkeypatch.setattr(server, "wait", lambda limit_s: (time.sleep(2.0), wait(limit_s)))
        await calls.workers.close()
        assert outcome.done()

    calls.loop.run(close())
    assert not failures


def test_a_server_ends_in_order_although_its_scorer_has_not_read_all_messages(capfd):
    limits = WorkerLimits(timeout_s=5.0, cpu_s=5.0, memory_bytes=1 << 30, file_bytes=1 << 20)
    control, server = start_server(f"{FUNCTIONS}.moody", limits, clean_environment(os.environ, []))
    control.recv(1 << 16)  # it is prepared
    channel, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(control, [b"start 0"], [theirs.fileno()])
    channel.recv(1 << 16)  # the worker is ready
    channel.close()
    assert select.select([control], [], [], DEADLINE_S)[0], "the server tells that the worker has ended"
    control.close()
    assert server.wait(DEADLINE_S) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_calls_fail_when_the_server_has_died(workers_of, tmp_path):
    calls = workers_of(timeout_s=DEADLINE_S)
    os.kill(calls.server.pid, signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="the server of the reward workers ended"):
        calls([f"until {tmp_path / 'never'}"])


def test_while_the_server_is_frozen_calls_go_on_in_the_workers_that_run(workers_of):
    calls = workers_of(num_workers=2, timeout_s=DEADLINE_S)
    calls(["fine"])
    calls.server.suspend()
    assert {outcome.reward for outcome in calls(["fine"] * 8)} == {1.0}


def test_while_the_server_is_frozen_a_dead_worker_receives_no_calls(workers_of):
    calls = workers_of(num_workers=2, timeout_s=DEADLINE_S)
    calls(["fine"] * 2)
    calls.server.suspend()

    async def kill() -> None:
        min(calls.server.children(), key=psutil.Process.create_time).kill()
        while not any(worker.is_ending for worker in calls.workers._workers.values()):
            await asyncio.sleep(0.01)

    calls.loop.run(kill())
    assert {outcome.reward for outcome in calls(["fine"] * 8)} == {1.0}


@pytest.mark.parametrize("needs", ["the end of a worker", "another worker"])
def test_a_frozen_server_that_has_something_to_do_is_killed_with_everything_below_it(
    workers_of, tmp_path, monkeypatch, needs
):
    calls = workers_of(timeout_s=4.0 if needs == "the end of a worker" else DEADLINE_S)

    async def freeze() -> list[int]:
        outcome = calls.workers.submit(calls.request(f"child {tmp_path / 'pid'}"))
        await written(tmp_path / "pid")
        monkeypatch.setattr(workers_module, "SERVER_S", 1.0)  # the start of a worker may take longer
        calls.server.suspend()
        (worker,) = calls.server.children()
        pids = [calls.server.pid, *(process.pid for process in calls.server.children(recursive=True))]
        if needs == "another worker":
            worker.kill()
        with pytest.raises(ProcessLostError, match="the server of the reward workers ended"):
            await outcome
        return pids

    pids = calls.loop.run(freeze())
    assert len(pids) == 3
    for pid in pids:
        wait_until_gone(pid)


def test_a_frozen_server_does_not_outlive_its_scorer(tmp_path):
    """The scorer is killed, as if it hung."""
    scorer = subprocess.Popen([sys.executable, "-c", SCORER, str(tmp_path / "pid")], stdout=subprocess.PIPE, text=True)
    assert scorer.stdout is not None
    server = int(scorer.stdout.readline())
    pids = [server, *(process.pid for process in psutil.Process(server).children(recursive=True))]
    assert len(pids) == 3
    os.kill(server, signal.SIGSTOP)
    scorer.kill()
    scorer.wait()
    for pid in pids:
        wait_until_gone(pid)


SCORER = f"""
import asyncio, pathlib, sys
from rollout.config import RewardConfig
from rollout.rewards.call import RewardRequest
from rollout.rewards.workers import RewardWorkers

async def main(file):
    workers = RewardWorkers(RewardConfig(function="{FUNCTIONS}.moody", timeout_s={DEADLINE_S}))
    await workers.start()
    others = dict(data_source="", ground_truth="", extra_info_json="null")
    outcome = workers.submit(RewardRequest(function="{FUNCTIONS}.moody", solution_str="child " + file, **others))
    while not pathlib.Path(file).exists():
        await asyncio.sleep(0.01)
    print(workers._server.pid, flush=True)
    await outcome

asyncio.run(main(sys.argv[1]))
"""


def test_workers_that_cannot_start_are_an_error(workers_of):
    calls = workers_of("tests.support.runs.unforkable_reward.compute_score")
    with pytest.raises(RewardBrokenError, match="5 workers in succession died before their first call: exit code 7"):
        calls(["fine"])
