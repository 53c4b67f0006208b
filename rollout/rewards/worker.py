"""The loop of a reward worker: takes requests from the scorer, calls the reward function, answers.

A worker runs one call of an ordinary function at a time. Of an `async def` function it runs many in one event loop, and
cancels each at its own time limit. Limits that need force (a call that blocks, CPU seconds, number of processes) are
the scorer's: it has the worker killed (`rollout.rewards.workers`).

When a worker has no call, nothing runs that its calls have started: it kills what they left behind.
"""

import asyncio
import os
import resource
import socket
from dataclasses import dataclass

from rollout.rewards.call import call_reward, call_reward_async, is_async, load_reward
from rollout.rewards.frames import Begun, Ended, Numbered, Ready, frame, read_request, receive_request
from rollout.rewards.process_tree import end_children


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of a worker. It applies all but `cpu_s` itself."""

    timeout_s: float
    """Of a call of an `async def` function."""
    cpu_s: float
    """CPU seconds of a call. The scorer applies it; the module of the reward function may find it too low."""
    memory_bytes: int
    """Most private memory of the worker, and of each process that it starts."""
    file_bytes: int
    """Largest file that they may write."""


def run_worker(channel: socket.socket, function: str, limits: WorkerLimits) -> None:
    """Answer requests until the scorer closes the channel.

    Raises:
        ValueError: there is no such function.
    """
    _limit_resources(limits)
    load_reward(function)
    channel.sendall(frame(Ready(pid=os.getpid())))
    if is_async(function):
        asyncio.run(_serve(channel, limits.timeout_s))
    else:
        while (numbered := receive_request(channel)) is not None:
            channel.sendall(frame(Begun(number=numbered.number)))
            outcome = call_reward(numbered.request)
            channel.sendall(frame(Ended(number=numbered.number, outcome=outcome, num_strays=end_children())))


def _limit_resources(limits: WorkerLimits) -> None:
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
    ):
        _, allowed = resource.getrlimit(limit)
        most = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        resource.setrlimit(limit, (most, most))


async def _serve(channel: socket.socket, timeout_s: float) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    running: set[asyncio.Task[None]] = set()

    async def answer(numbered: Numbered) -> None:
        outcome = await call_reward_async(numbered.request, timeout_s=timeout_s)
        is_last = len(running) == 1
        num_strays = end_children() if is_last else 0
        writer.write(frame(Ended(number=numbered.number, outcome=outcome, num_strays=num_strays)))

    while True:
        try:
            numbered = await read_request(reader)
        except asyncio.IncompleteReadError:
            return
        writer.write(frame(Begun(number=numbered.number)))
        task = asyncio.create_task(answer(numbered))
        running.add(task)
        task.add_done_callback(running.discard)
