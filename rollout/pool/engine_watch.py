"""Finds engines that live but emit nothing, and ends them, so that their groups continue elsewhere.

An engine with unfinished responses is asked how many tokens it has emitted. If the number stays the same for
`timeout_s` although the engine could sample, or if the engine does not answer at all, it hangs. Only time counts in
which somebody waited: between two steps nobody asks (decision 46).
"""

import time
from collections.abc import Collection

import ray

from rollout.engine.state import EngineProgress
from rollout.failures import CallError, Place, brief, node_of
from rollout.pool.engine_group import EngineGroup

_ASK_EVERY_S = 5.0


class EngineWatch:
    """Watches the engines of a pool; `look` mutates."""

    def __init__(self, engines: EngineGroup, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """Longest time without a token."""
        self.look_every_s = min(_ASK_EVERY_S, timeout_s / 4)
        """Call `look` at least this often while somebody waits."""
        self._engines = engines
        self._looked_at = time.monotonic()
        self._questions: dict[ray.ObjectRef, int] = {}
        self._num_tokens: dict[int, int] = {}
        self._silent_s: dict[int, float] = {}

    def look(self, busy: Collection[int]) -> None:
        """Ask the engines that have unfinished responses, and end those that hang.

        Raises:
            CallError: an engine raised.
        """
        now = time.monotonic()
        waited = min(now - self._looked_at, 2 * self.look_every_s)
        if now - self._looked_at < self.look_every_s:
            return
        self._looked_at = now
        self._silent_s = {number: self._silent_s.get(number, 0.0) + waited for number in busy}
        self._read_answers()
        for number in set(busy) - set(self._questions.values()):
            self._questions[self._engines.actors[number].progress.remote()] = number
        for number in [number for number, silent_s in self._silent_s.items() if silent_s > self.timeout_s]:
            del self._silent_s[number]
            self._num_tokens.pop(number, None)
            why = f"emitted no token for {self.timeout_s:.0f} s (`engine.progress_timeout_s`)"
            self._engines.end_hung(number, why)

    def _read_answers(self) -> None:
        answered, _ = ray.wait(list(self._questions), num_returns=len(self._questions), timeout=0)
        for ref in answered:
            number = self._questions.pop(ref)
            try:
                progress: EngineProgress = ray.get(ref)
            except ray.exceptions.RayActorError:  # dead: the calls that the pool waits for say so
                continue
            except ray.exceptions.RayError as error:
                place = Place(role="engine", ranks=(number,), node=node_of(error))
                raise CallError(f"engine {number}: progress failed: {brief(error)}", place) from error
            if progress.num_tokens != self._num_tokens.get(number) or not progress.can_sample:
                self._silent_s.pop(number, None)
            self._num_tokens[number] = progress.num_tokens
