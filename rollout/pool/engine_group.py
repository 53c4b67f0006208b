"""All engines of a run, called at once and waited for with a deadline; who of them is there.

An engine is lost when its process, or vLLM's inside it, has ended. It is not called until another takes its place
(`replace`), under its number.
"""

from collections.abc import Sequence

import ray

from rollout.failures import CallError, DeadlineError, Place, ProcessLostError, brief, node_of
from rollout.weights.manifest import Required


class EngineGroup:
    """All engines of a run, called at once; errors name the engine. `lose` and `replace` mutate."""

    def __init__(self, actors: Sequence[ray.actor.ActorHandle], *, num_ranks: int) -> None:
        """`actors` are `rollout.engine.actor.EngineActor` handles, each with `num_ranks` ranks."""
        self._actors = list(actors)
        self._lost: dict[int, str] = {}
        self.num_ranks = num_ranks

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def actors(self) -> tuple[ray.actor.ActorHandle, ...]:
        """By number, lost ones too."""
        return tuple(self._actors)

    @property
    def lost(self) -> tuple[int, ...]:
        """Numbers of engines that are not there, ascending."""
        return tuple(sorted(self._lost))

    @property
    def there(self) -> tuple[int, ...]:
        """Numbers of the others."""
        return tuple(number for number in range(len(self._actors)) if number not in self._lost)

    def lose(self, number: int, why: str) -> None:
        """An engine has died."""
        self._lost.setdefault(number, why)

    def why(self, number: int) -> str:
        """What an engine was lost of; empty for one that is there."""
        return self._lost.get(number, "")

    def replace(self, number: int, actor: ray.actor.ActorHandle) -> None:
        """Another one has taken its place."""
        self._actors[number] = actor
        self._lost.pop(number, None)

    def notice_deaths(self, *, timeout_s: float) -> None:
        """Ask every engine whether it and its vLLM are alive; those that are not are lost from now on.

        An engine that does not answer in time is not judged: whoever calls it next waits, and names it.
        """
        asking = {self._actors[number].fault.remote(): number for number in self.there}
        done, _ = ray.wait(list(asking), num_returns=len(asking), timeout=timeout_s) if asking else ([], [])
        for ref in done:
            try:
                fault: str = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                fault = brief(error)
            if fault:
                self.lose(asking[ref], fault)

    def begin(self, method: str, *args: object) -> list[ray.ObjectRef]:
        """Start `method(*args)` on every engine that is there; pass the result to `wait`."""
        return [getattr(self._actors[number], method).remote(*args) for number in self.there]

    def wait(self, refs: Sequence[ray.ObjectRef], method: str, *, timeout_s: float) -> list[object]:
        """Results in the order of the engines.

        Errors name the engine by number.

        Raises:
            CallError: an engine raised.
            ProcessLostError: an engine's process ended.
            DeadlineError: an engine had not finished after `timeout_s`.
        """
        if not refs:
            return []
        numbers = dict(zip(refs, self.there if len(refs) == len(self.there) else range(len(refs)), strict=True))
        done, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s, fetch_local=False)
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                kind = ProcessLostError if isinstance(error, ray.exceptions.RayActorError) else CallError
                raise kind(
                    f"engine {numbers[ref]}: {method} failed: {brief(error)}",
                    Place(role="engine", ranks=(numbers[ref],), node=node_of(error)),
                ) from error
        if late:
            found = sorted(numbers[ref] for ref in late)
            raise DeadlineError(
                f"engine(s) {found} had not finished `{method}` after {timeout_s:.0f} s, for which the controller "
                "waited",
                Place(role="engine", ranks=tuple(found)),
            )
        return list(ray.get(list(refs)))

    def call(self, method: str, *args: object, timeout_s: float) -> list[object]:
        """`begin` and `wait`."""
        return self.wait(self.begin(method, *args), method, timeout_s=timeout_s)

    def tell(self, method: str, *args: object, timeout_s: float) -> None:
        """`call`, but an engine that has died is lost and no error.

        Raises:
            RuntimeError: a living engine raised, or had not finished after `timeout_s`; named by number.
        """
        try:
            self.call(method, *args, timeout_s=timeout_s)
        except RuntimeError:
            before = self.lost
            self.notice_deaths(timeout_s=timeout_s)
            if self.lost == before:
                raise
            self.tell(method, *args, timeout_s=timeout_s)

    def required(self, *, timeout_s: float) -> list[Required]:
        """What each rank of an engine takes of a publish.

        Raises:
            RuntimeError: engines differ in it, so that one plan cannot serve them all.
        """
        first, *others = self.call("required", timeout_s=timeout_s)
        for number, other in enumerate(others, start=1):
            if other != first:
                raise RuntimeError(f"engine {number} takes other parts of the weights than engine 0")
        assert isinstance(first, list)
        return first
