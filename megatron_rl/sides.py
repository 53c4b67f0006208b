"""What engines with unfinished responses do while the trainer works: stand still, or go on.

Only with `planner.overlap` or `planner.head_start` is anything unfinished then.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rollout.engine_group import EngineGroup
from rollout.pool import EnginePool


class Alternating:
    """`placement.mode` = colocated: engines stand still, and keep what they have begun."""

    def __init__(self, engines: EngineGroup, *, timeout_s: float, leaves_work: bool) -> None:
        """Without `leaves_work` all that was admitted is finished when the trainer begins, and nobody is asked."""
        self._engines = engines
        self._timeout_s = timeout_s
        self._leaves_work = leaves_work
        self._stand_still = False

    @contextmanager
    def trainer_works(self) -> Iterator[None]:
        """Engines stand still, and do so until they are waited for."""
        if self._leaves_work and not self._stand_still:
            self._engines.tell("stand_still", timeout_s=self._timeout_s)
            self._stand_still = True
        yield

    def engines_work(self) -> None:
        """They go on."""
        if self._stand_still:
            self._engines.tell("go_on", timeout_s=self._timeout_s)
            self._stand_still = False


class Apart:
    """`placement.mode` = disaggregated: engines go on, and are given what waits."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    @contextmanager
    def trainer_works(self) -> Iterator[None]:
        """The pool works aside."""
        with self._pool.aside():
            yield

    def engines_work(self) -> None:
        """They never stopped."""
