"""Actors that are called all at once or not at all.

Every method of a trainer rank is SPMD: it enters collectives, so it must be entered by all ranks or by
none. A call therefore goes to all ranks together and has one deadline. If a rank fails or is late, its
peers may wait for ever inside a collective; the whole group is killed, and the error names who failed
or who was late. Nothing is repaired in place: a group is rebuilt from the checkpoint.

Must not import torch: the controller lives in this process.
"""

import time
from collections.abc import Sequence

import ray

from rollout.failures import CallError, DeadlineError, Place, ProcessLostError, brief, node_of

PEER_DEATH_S = 2.0
"""How long a rank that raised waits for news of a peer's death, which is then the reason of its error."""


class SpmdGroup:
    """Ray actors in rank order; `name` stands in errors."""

    def __init__(self, name: str, actors: Sequence[ray.actor.ActorHandle], *, timeout_s: float) -> None:
        self._name = name
        self._actors = tuple(actors)
        self._timeout_s = timeout_s

    @property
    def num_ranks(self) -> int:
        """Actors of the group."""
        return len(self._actors)

    def call(self, method: str, *args: object, timeout_s: float | None = None) -> list[object]:
        """Call `method(*args)` on every rank; results in rank order.

        The group is dead after any error.

        Raises:
            CallError: a rank raised; the error names it.
            ProcessLostError: a rank's process ended.
            DeadlineError: a rank had not returned after `timeout_s`.
        """
        return self.wait(self.begin(method, *args), method, timeout_s=timeout_s)

    def begin(self, method: str, *args: object) -> list[ray.ObjectRef]:
        """Start `method(*args)` on every rank and return at once; pass the result to `wait`."""
        return [getattr(actor, method).remote(*args) for actor in self._actors]

    def wait(self, refs: Sequence[ray.ObjectRef], method: str, *, timeout_s: float | None = None) -> list[object]:
        """Results of a call that `begin` started, in rank order; errors as for `call`."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
            for ref in done:
                self._raise_if_failed(refs, refs.index(ref), method)
            if not done:
                late = [refs.index(ref) for ref in pending]
                self.kill()
                raise DeadlineError(
                    f"{self._name}.{method}: rank(s) {late} of {len(refs)} had not returned after {limit_s:.0f} s, for "
                    "which the controller waited; the group was killed, resume the run from its last checkpoint",
                    Place(role=self._name, ranks=tuple(late)),
                )
        return list(ray.get(list(refs)))

    def _raise_if_failed(self, refs: Sequence[ray.ObjectRef], rank: int, method: str) -> None:
        try:
            ray.get(refs[rank])
        except ray.exceptions.RayError as error:
            failed, reason = self._first_death(refs, rank, error)
            self.kill()
            kind = ProcessLostError if isinstance(reason, ray.exceptions.RayActorError) else CallError
            raise kind(
                f"{self._name}.{method} failed on rank {failed} of {self.num_ranks}: {brief(reason)}",
                Place(role=self._name, ranks=(failed,), node=node_of(reason)),
            ) from reason

    def _first_death(
        self, refs: Sequence[ray.ObjectRef], rank: int, error: ray.exceptions.RayError
    ) -> tuple[int, ray.exceptions.RayError]:
        """Rank and error of a process that ended, if there is one: its peers' collectives fail because of it."""
        if isinstance(error, ray.exceptions.RayActorError):
            return rank, error
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=PEER_DEATH_S, fetch_local=False)
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError as death:
                return refs.index(ref), death
            except ray.exceptions.RayError:
                continue
        return rank, error

    def kill(self) -> None:
        """End every rank at once."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
