"""All engines of a run, called at once and waited for with a deadline."""

from collections.abc import Sequence

import ray

from rollout.wire import Wanted


class EngineGroup:
    """All engines of a run, called at once; errors name the engine."""

    def __init__(self, actors: Sequence[ray.actor.ActorHandle], *, num_ranks: int) -> None:
        """`actors` are `rollout.engine_actor.EngineActor` handles, each with `num_ranks` ranks."""
        self.actors = tuple(actors)
        self.num_ranks = num_ranks

    def begin(self, method: str, *args: object) -> list[ray.ObjectRef]:
        """Start `method(*args)` on every engine; pass the result to `wait`."""
        return [getattr(actor, method).remote(*args) for actor in self.actors]

    def wait(self, refs: Sequence[ray.ObjectRef], method: str, *, timeout_s: float) -> list[object]:
        """Results in the order of the engines.

        Raises:
            RuntimeError: an engine raised, died, or had not finished after `timeout_s`; named by number.
        """
        done, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s, fetch_local=False)
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                raise RuntimeError(f"engine {list(refs).index(ref)}: {method} failed: {error}") from error
        if late:
            numbers = [list(refs).index(ref) for ref in late]
            raise RuntimeError(f"engine(s) {numbers} had not finished `{method}` after {timeout_s:.0f} s")
        return list(ray.get(list(refs)))

    def call(self, method: str, *args: object, timeout_s: float) -> list[object]:
        """`begin` and `wait`."""
        return self.wait(self.begin(method, *args), method, timeout_s=timeout_s)

    def wanted(self, *, timeout_s: float) -> list[Wanted]:
        """What each rank of an engine takes of a publish.

        Raises:
            RuntimeError: engines differ in it, so that one plan cannot serve them all.
        """
        first, *others = self.call("wanted", timeout_s=timeout_s)
        for number, other in enumerate(others, start=1):
            if other != first:
                raise RuntimeError(f"engine {number} takes other parts of the weights than engine 0")
        assert isinstance(first, list)
        return first
