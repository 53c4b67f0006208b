"""The reward workers of a scorer, seen from the scorer: so many calls at a time, in order of submission.

A worker runs one call of an ordinary function, or `reward.async_concurrency` of an `async def`. It is killed, with all
that its calls started, if a call exceeds its time (an `async def` that is only cancelled in time keeps its worker), if
its calls use more CPU seconds or processes than they may, or if it dies. Another one takes its place.

Invariants:

* A call fails for the end of a worker only if it was alone there. Calls that shared a worker run again, each alone.
* A call that was alone in a worker runs once more if the worker was killed or frozen from outside.
* A call that a worker has not begun is repeated.
* The time of a call is that in which this process was not stopped (`AwakeClock`). One that its worker has ended as late
  earlier than that runs again: the whole job was suspended.
* Among calls that wait, the oldest is begun first. While it needs a worker alone, one worker takes no other calls, and
  is empty within `reward.timeout_s` and a grace; the others go on. Such calls run in turn, or in empty workers.

All methods run in one event loop; nothing in them waits for a worker. A server that neither starts nor ends a worker in
time is killed with all its workers: then no call runs here any more, and the scorer ends (`ScorerActor`).
"""

import asyncio
import itertools
import logging
import pickle
import signal
import socket
import subprocess
from collections.abc import Coroutine
from dataclasses import dataclass, field
from os import environ

from history.patience import AwakeClock
from rollout.config import RewardConfig
from rollout.failures import PlacedError, ProcessLostError, RewardBrokenError, brief
from rollout.rewards.call import RewardOutcome, RewardRequest, late_outcome
from rollout.rewards.call_queue import Call, CallQueue
from rollout.rewards.frames import Answer, Begun, Ended, Numbered, Ready, frame, read_answer
from rollout.rewards.process_tree import cpu_seconds, descendants, is_stopped, kill_tree
from rollout.rewards.worker import WorkerLimits
from rollout.rewards.worker_server import Exited, Prepared, clean_environment, start_server
from rollout.types import WorkerEvents

GRACE_S = 2.0
"""Time for a worker to answer after it has cancelled a late call; then a call must block the event loop."""
_LOOK_EVERY_S = AwakeClock.READ_EVERY_S
"""Interval in which CPU seconds and processes are counted."""
_MAX_FAILED_STARTS = 5
"""Workers that die in succession before they are ready; then none can start."""
_MAX_TRIES = 3
"""Workers that a call may lose before it fails."""
_RETRY_S = 0.1
"""Pause after a failed start, times the number of those in succession; also if the server has not read its commands."""
_END_S = 10.0
"""Time for the server to end its workers."""
SERVER_S = 60.0
"""Time for the server to start or to end one worker. A server that needs longer hangs."""
_NUM_BYTES = 1 << 16
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    number: int
    channel: socket.socket
    exited: "asyncio.Future[int]"
    """The exit code."""
    writer: asyncio.StreamWriter | None = None
    pid: int = 0
    """0 until it is ready."""
    calls: dict[int, Call] = field(default_factory=dict)
    runs_alone: bool = False
    """Its call may not share it."""
    cpu_before_s: float = 0.0
    """Its CPU seconds when it last had no call."""
    num_calls: int = 0
    """Calls since then."""
    verdict: RewardOutcome | None = None
    """Why it is being ended."""
    was_frozen: bool = False
    """Somebody had stopped it when it was found to be late."""
    is_ending: bool = False
    """The server is told to end it."""
    hides_answers: bool = False
    """A write to it has failed, or an answer was none, so others of its answers may be unread."""
    owed_s: float = 0.0
    """Time for which the server has owed its start or its end."""

    def empty_by_s(self) -> float:
        """When it has no call at the latest, by the event loop's clock, if it takes no other; 0 if it has none."""
        return max((call.limit.when() for call in self.calls.values() if call.limit is not None), default=0.0)


class RewardWorkers:
    """The server of workers, its workers and the calls that wait for one."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self.late_score: float | None = None
        """Reward of a late call that the function's module declares, once started."""
        self._workers: dict[int, _Worker] = {}
        self._queue = CallQueue()
        self._clock = AwakeClock()
        self._numbers = itertools.count()
        self._num_failed_starts = 0
        self._per_worker = 1
        self._broken: PlacedError | None = None
        """Why no call will ever run."""
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_restarts = self._num_repeated = self._num_strays = 0

    async def start(self) -> None:
        """Import the reward function, in the server, and start the workers.

        Raises:
            ValueError: the reward function's path is bad, it cannot work on this machine, or its module's `LATE_SCORE`
                is no finite number.
            RewardBrokenError: the function's module fails while it is imported.
        """
        config = self._config
        limits = WorkerLimits(
            timeout_s=config.timeout_s,
            cpu_s=config.cpu_s,
            memory_bytes=config.memory_bytes,
            file_bytes=config.max_file_bytes,
        )
        self._control, self._server = start_server(
            config.function, limits, clean_environment(environ, config.environment)
        )
        self._control.setblocking(False)
        message = await asyncio.get_running_loop().sock_recv(self._control, _NUM_BYTES)
        prepared: Prepared = (
            pickle.loads(message) if message else Prepared(error=RewardBrokenError(_import_ended(config.function)))
        )
        if prepared.error is not None:
            await self.close()
            raise prepared.error
        self.late_score = prepared.late_score
        self._per_worker = config.async_concurrency if prepared.is_async else 1
        self._spawn(self._listen(self._control))
        self._spawn(self._watch())
        for _ in range(config.num_workers):
            self._start_worker()

    def submit(self, request: RewardRequest) -> "asyncio.Future[RewardOutcome]":
        """Begin a call as soon as a worker is free.

        The future raises ProcessLostError if the server of the workers died, RewardBrokenError if no worker can start.
        """
        outcome: asyncio.Future[RewardOutcome] = asyncio.get_running_loop().create_future()
        if self._broken is not None:
            outcome.set_exception(self._broken)
            return outcome
        self._queue.add(Call(number=next(self._numbers), request=request, outcome=outcome))
        self._dispatch()
        return outcome

    def take_events(self) -> WorkerEvents:
        """What has happened to workers since the last call."""
        events = WorkerEvents(
            num_restarts=self._num_restarts, num_repeated=self._num_repeated, num_strays=self._num_strays
        )
        self._num_restarts = self._num_repeated = self._num_strays = 0
        return events

    async def close(self) -> None:
        """End all workers, and what their calls have started; calls that have not ended are cancelled."""
        if self._control is None or self._server is None:
            return
        control, server = self._control, self._server
        self._control = self._server = None  # time limits of calls pass meanwhile
        self._broken = self._broken or ProcessLostError("the reward workers were closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        control.close()
        server.send_signal(signal.SIGCONT)  # it may be frozen
        try:
            await asyncio.to_thread(server.wait, _END_S)
        except subprocess.TimeoutExpired:
            kill_tree(server.pid)
        for call in self._unsettled():
            call.outcome.cancel()

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """If a task has failed, end all calls: without it nobody may hear of their ends."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task beside the reward workers failed", exc_info=error)
            self._give_up(ProcessLostError(f"a task beside the reward workers failed: {brief(error)}"))

    # calls

    def _dispatch(self) -> None:
        """Give waiting calls to workers with room, to the emptiest one first."""
        while True:
            able = [w for w in self._workers.values() if w.pid and not w.is_ending and not w.runs_alone]
            if self._must_empty_one() and all(w.calls for w in able):
                able = sorted(able, key=_Worker.empty_by_s)[1:]
            worker = min(able, key=lambda w: len(w.calls), default=None)
            if worker is None:
                return
            taken = self._queue.take(num_running=len(worker.calls), most=self._per_worker)
            if taken is None:
                return
            call, worker.runs_alone = taken
            self._give(worker, call)

    def _must_empty_one(self) -> bool:
        """Whether a worker has to be kept from other calls, so that the oldest one can run alone there."""
        return self._queue.oldest_is_alone() and not any(w.runs_alone for w in self._workers.values())

    def _give(self, worker: _Worker, call: Call) -> None:
        if not worker.calls:
            worker.cpu_before_s, worker.num_calls = cpu_seconds([worker.pid]), 0
        worker.num_calls += 1
        worker.calls[call.number] = call
        call.has_begun, call.num_tries = False, call.num_tries + 1
        assert worker.writer is not None
        worker.writer.write(frame(Numbered(number=call.number, request=call.request)))
        grace_s = 0.0 if self._per_worker == 1 else GRACE_S
        limit_s = self._config.timeout_s + grace_s
        call.given_s = self._clock()
        call.limit = asyncio.get_running_loop().call_later(limit_s, self._late, worker, call, limit_s)

    def _late(self, worker: _Worker, call: Call, limit_s: float) -> None:
        """End the worker of a call that is late, unless this process was stopped meanwhile."""
        left_s = call.given_s + limit_s - self._clock()
        if left_s > 0:
            call.limit = asyncio.get_running_loop().call_later(left_s, self._late, worker, call, limit_s)
        else:
            self._end(worker, late_outcome(self._config.timeout_s))

    def _end(self, worker: _Worker, verdict: RewardOutcome) -> None:
        """Have a worker killed, with its group."""
        if worker.verdict is None:
            worker.verdict, worker.was_frozen = verdict, is_stopped(worker.pid)
        self._command_end(worker)

    def _lost(self, worker: _Worker, code: int) -> None:
        """A worker has ended: its calls fail or run again, and another worker starts."""
        del self._workers[worker.number]
        was_ready = worker.pid != 0
        self._num_restarts += was_ready
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        verdict = worker.verdict or RewardOutcome(error=f"its process died: {_exit_text(code)}")
        is_outer = worker.was_frozen or (worker.verdict is None and code == -signal.SIGKILL)
        suspects = [call for call in worker.calls.values() if call.has_begun or worker.hides_answers]
        for call in worker.calls.values():
            is_culprit = call.has_begun and len(suspects) == 1 and not (is_outer and call.num_tries == 1)
            if is_culprit or call.num_tries >= _MAX_TRIES:
                call.settle(verdict)
            else:
                frozen = ", and was frozen" if worker.was_frozen else ""
                self._again(call, f"its worker was lost: {verdict.error}{frozen}", alone=call in suspects)
        if self._num_failed_starts >= _MAX_FAILED_STARTS:
            text = f"reward.function: {self._config.function}: {self._num_failed_starts} workers in succession died "
            self._give_up(RewardBrokenError(f"{text}before their first call: {_exit_text(code)}; see the scorer's log"))
        elif self._broken is None:
            asyncio.get_running_loop().call_later(_RETRY_S * self._num_failed_starts, self._start_worker)

    def _again(self, call: Call, reason: str, *, alone: bool = False) -> None:
        call.stop_clock()
        self._num_repeated += 1
        self._queue.add(call, alone=alone)
        _log.warning("a call runs again: %s", reason)

    def _give_up(self, error: PlacedError) -> None:
        """No call will ever run."""
        self._broken = error
        for call in self._unsettled():
            if not call.outcome.done():
                call.outcome.set_exception(error)

    def _unsettled(self) -> list[Call]:
        running = [call for worker in self._workers.values() for call in worker.calls.values()]
        return [*running, *self._queue.take_all()]

    # workers

    def _start_worker(self) -> None:
        if self._broken is not None or self._control is None:
            return
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [f"start {number}".encode()], [theirs.fileno()])
            except BlockingIOError:  # `_watch` notices a server that reads nothing
                ours.close()
                asyncio.get_running_loop().call_later(_RETRY_S, self._start_worker)
                return
            except ConnectionError:  # `_listen` notices that the server is gone
                pass
        worker = _Worker(number=number, channel=ours, exited=asyncio.get_running_loop().create_future())
        self._workers[number] = worker
        self._spawn(self._follow(worker))

    def _command_end(self, worker: _Worker) -> None:
        worker.is_ending = True
        if self._control is None or worker.number not in self._workers:
            return
        try:
            self._control.send(f"end {worker.number}".encode())
        except BlockingIOError:  # as above
            asyncio.get_running_loop().call_later(_RETRY_S, self._command_end, worker)
        except ConnectionError:  # as above
            pass

    async def _follow(self, worker: _Worker) -> None:
        """Act on a worker's answers until it ends."""
        reader, worker.writer = await asyncio.open_connection(sock=worker.channel)
        try:
            try:
                while True:
                    self._hear(worker, await read_answer(reader))
                    self._dispatch()
            except asyncio.IncompleteReadError:
                pass
            except ConnectionError:
                worker.hides_answers = True
            self._command_end(worker)  # the function may have closed the channel
            self._lost(worker, await worker.exited)
            self._dispatch()
        finally:
            worker.writer.close()

    def _hear(self, worker: _Worker, answer: Answer) -> None:
        """Act on an answer; ConnectionError if it is of a call that the worker does not have.

        A function that forks and returns in both processes answers twice.
        """
        if isinstance(answer, Ready):
            worker.pid, self._num_failed_starts = answer.pid, 0
        elif answer.number not in worker.calls:
            raise ConnectionError(f"a worker has answered call {answer.number}, which it does not have")
        elif isinstance(answer, Begun):
            worker.calls[answer.number].has_begun = True
        else:
            self._ended(worker, answer)

    def _ended(self, worker: _Worker, answer: Ended) -> None:
        call = worker.calls.pop(answer.number)
        if answer.outcome.is_late and self._clock() - call.given_s < self._config.timeout_s:
            call.num_tries -= 1  # a job may be suspended many times
            self._again(call, "it ended as late while this job was suspended")
        else:
            call.settle(answer.outcome)
        self._num_strays += answer.num_strays
        if not worker.calls:
            worker.runs_alone = False

    async def _listen(self, control: socket.socket) -> None:
        """Hear from the server which workers have ended."""
        message = b"x"
        while message:
            try:
                message = await asyncio.get_running_loop().sock_recv(control, _NUM_BYTES)
            except ConnectionError:
                message = b""
            if message:
                exited: Exited = pickle.loads(message)
                self._workers[exited.number].exited.set_result(exited.code)
        self._give_up(ProcessLostError("the server of the reward workers ended"))

    async def _watch(self) -> None:
        """End workers whose calls use more CPU seconds or processes than they may, and a server that hangs."""
        cpu_s, num_processes = self._config.cpu_s, self._config.max_processes
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._clock()
            self._end_hung_server()
            for worker in [w for w in self._workers.values() if w.calls and w.verdict is None]:
                family = descendants(worker.pid)
                used_s = cpu_seconds([worker.pid, *family]) - worker.cpu_before_s
                if used_s > cpu_s * worker.num_calls:
                    self._end(worker, RewardOutcome(error=f"over the limit of {cpu_s} CPU seconds", is_late=True))
                elif len(family) > num_processes * len(worker.calls):
                    self._end(worker, RewardOutcome(error=f"over the limit of {num_processes} processes"))

    def _end_hung_server(self) -> None:
        """Kill the server, with all workers, if it owes the start or the end of one for too long.

        Looks are counted, not seconds: this process may be frozen itself.
        """
        for worker in self._workers.values():
            owes = worker.is_ending or not worker.pid
            worker.owed_s = worker.owed_s + _LOOK_EVERY_S if owes else 0.0
        if self._server is not None and any(worker.owed_s > SERVER_S for worker in self._workers.values()):
            _log.warning("the server of the reward workers does nothing for %.0f s and is killed with them", SERVER_S)
            kill_tree(self._server.pid)  # `_listen` notices


def _import_ended(function: str) -> str:
    return f"reward.function: {function}: the process that imported its module died; see the scorer's log"


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    names = {member.value: member.name for member in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
