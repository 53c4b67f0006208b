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

        Raises:
            RuntimeError: a rank raised, died, or had not returned after `timeout_s`; the group is dead then.
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
                self._raise_if_failed(ref, refs.index(ref), method)
            if not done:
                late = [refs.index(ref) for ref in pending]
                self.kill()
                raise RuntimeError(
                    f"{self._name}.{method}: rank(s) {late} of {len(refs)} had not returned after {limit_s:.0f} s; "
                    "the group was killed, resume the run from its last checkpoint"
                )
        return list(ray.get(list(refs)))

    def _raise_if_failed(self, ref: ray.ObjectRef, rank: int, method: str) -> None:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            self.kill()
            raise RuntimeError(f"{self._name}.{method} failed on rank {rank} of {self.num_ranks}: {error}") from error

    def kill(self) -> None:
        """End every rank at once."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
