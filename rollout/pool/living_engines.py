"""The engines of a run: which of them live, and how they are lost, ended and replaced.

An engine is lost when its process, or vLLM's process inside it, has ended. It is not called until a new engine takes
its number (`replace`). One that lives but does not answer is ended first.
"""

import logging
from collections.abc import Sequence

import ray

from history.ray_wait import wait_for_all
from rollout.failures import brief
from rollout.processes import ProcessId
from rollout.remote_kill import kill_on_nodes

_log = logging.getLogger(__name__)


class LivingEngines:
    """Engines by number. `mark_lost`, `retire`, `replace` and what ends or asks engines mutate."""

    def __init__(self, actors: Sequence[ray.actor.ActorHandle], *, hosts: Sequence[str] = (), first: int = 0) -> None:
        """All `actors` live.

        `hosts`: names of the machines on which they are to start, for messages; empty where unknown.
        `first`: number of the first engine in messages; above 0 in a group whose engines replace others (`replace`).
        """
        self._actors = list(actors)
        self._incarnations = [0] * len(self._actors)
        self._lost: dict[int, str] = {}
        self._retired: set[int] = set()
        self._processes: dict[int, ProcessId | None] = {}
        self._hosts = list(hosts) or [""] * len(self._actors)
        self._first = first
        self.num_hung = 0
        """Engines that were ended because they did nothing."""

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def actors(self) -> tuple[ray.actor.ActorHandle, ...]:
        """Handles by engine number, lost engines included."""
        return tuple(self._actors)

    @property
    def incarnations(self) -> tuple[int, ...]:
        """By engine number, how often the engine was replaced."""
        return tuple(self._incarnations)

    @property
    def lost(self) -> tuple[int, ...]:
        """Numbers of lost engines, ascending."""
        return tuple(sorted(self._lost))

    @property
    def retired(self) -> tuple[int, ...]:
        """Numbers of lost engines that will not be replaced, ascending."""
        return tuple(sorted(self._retired))

    @property
    def alive(self) -> tuple[int, ...]:
        """Numbers of engines that are not lost, ascending."""
        return tuple(number for number in range(len(self._actors)) if number not in self._lost)

    def node_of(self, number: int) -> str:
        """Ray's id of the node on which an engine, or its lost predecessor, has started; empty before its start."""
        process = self._processes.get(number)
        return "" if process is None else process.node_id

    def host_of(self, number: int) -> str:
        """Name of the machine of an engine, for messages; empty where unknown."""
        process = self._processes.get(number)
        return self._hosts[number] if process is None else process.host

    def mark_lost(self, number: int, why: str) -> None:
        """Record that an engine has died, and why."""
        self._lost.setdefault(number, why)

    def retire(self, number: int, why: str) -> None:
        """Give up an engine for good, because its node is lost and no other has room."""
        self.mark_lost(number, why)
        self._retired.add(number)

    def loss_reason(self, number: int) -> str:
        """Why an engine was lost; empty for one that is alive."""
        return self._lost.get(number, "")

    def replace(self, number: int, engines: "LivingEngines") -> None:
        """The only engine of `engines`, which has started, takes the number of a lost one."""
        (self._actors[number],) = engines._actors
        self._incarnations[number] += 1
        self._processes[number] = engines._processes.get(0)
        self._hosts[number] = engines._hosts[0]
        self._lost.pop(number, None)

    def end_hung(self, number: int, why: str) -> None:
        """End an engine that lives but does nothing, with its children; it is lost, and its calls fail."""
        self.num_hung += 1
        process = self._processes.get(number)
        host = self.host_of(number)
        at = f" ({process})" if process is not None else f" (on {host})" if host else ""
        reason = f"engine {self._first + number}{at} {why} and was ended"
        _log.warning(reason)
        self.mark_lost(number, reason)
        if process is not None and (folders := kill_on_nodes([process], stacks=True)):
            _log.warning("the stacks of engine %d are in %s", self._first + number, ", ".join(folders))
        ray.kill(self._actors[number], no_restart=True)

    def end_lost(self) -> None:
        """Kill what is left of lost engines that will be replaced; returns when their processes have ended."""
        lost = [self._processes.get(number) for number in self.lost if number not in self._retired]
        kill_on_nodes([process for process in lost if process is not None], stacks=False)

    def end_silent(self, *, timeout_s: float) -> None:
        """End every engine of which a rank does not answer in time. Call it while engines do not sample.

        An engine whose ranks cannot be called is lost: vLLM's process may need seconds to end after one of its ranks.
        """
        asking = {self._actors[number].ping.remote(): number for number in self.alive}
        done, silent = wait_for_all(list(asking), timeout_s=timeout_s)
        for ref in silent:
            self.end_hung(asking[ref], f"did not answer for {timeout_s:.0f} s")
        failed: dict[int, str] = {}
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                failed[asking[ref]] = f"its ranks cannot be called: {brief(error)}"
        if failed:
            self.check_alive(timeout_s=timeout_s)  # it may know a better reason
        for number, why in failed.items():
            self.mark_lost(number, why)

    def check_alive(self, *, timeout_s: float) -> None:
        """Ask every engine whether it and its vLLM are alive, and mark dead engines as lost.

        An engine that does not answer in time keeps its state; the next call waits for it and names it if it is late.
        """
        asking = {self._actors[number].fault.remote(): number for number in self.alive}
        done, _ = wait_for_all(list(asking), timeout_s=timeout_s)
        for ref in done:
            try:
                fault: str = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                fault = brief(error)
            if fault:
                self.mark_lost(asking[ref], fault)
