"""Asks a busy engine for its running groups while another one idles, and aborts the group that moves.

`rollout.planning.migration` decides which engine is asked and which group moves. The pool keeps the aborted group, with
its tokens, for the idle engine.
"""

from collections import Counter
from collections.abc import Collection

import ray

from rollout.planning.dispatcher import Dispatcher
from rollout.planning.migration import GroupMigration, InFlight
from rollout.pool.engine_call import EngineQuestion
from rollout.pool.engine_group import EngineGroup
from rollout.pool.group_places import GroupPlaces
from rollout.types import TRAIN


class MigrationSurvey:
    """At most one question under way. All methods mutate."""

    def __init__(
        self, migration: GroupMigration, engines: EngineGroup, dispatcher: Dispatcher, places: GroupPlaces
    ) -> None:
        """`dispatcher` and `places` are the pool's."""
        self._migration = migration
        self._engines = engines
        self._dispatcher = dispatcher
        self._places = places
        self.calls: dict[ray.ObjectRef, EngineQuestion] = {}
        """The question under way, if any. Only the methods change it."""

    def ask(self, closed: Collection[int]) -> None:
        """Ask the engine that could give a group to an idle one; none of the lost engines `closed`."""
        generating = self._places.generating.values()
        running = Counter(item.engine for item in generating if item.engine not in closed)
        engine = self._migration.donor(running, self._idle_engine())
        if engine is not None:
            call = self._engines.actors[engine].in_flight.remote()
            incarnation = self._engines.incarnations[engine]
            self.calls[call] = EngineQuestion(engine=engine, incarnation=incarnation, method="in_flight")

    def answered(self, call: ray.ObjectRef) -> None:
        """The engine has answered: abort the group that moves, if any.

        Raises:
            RayError: the call has failed.
        """
        engine = self.calls.pop(call).engine
        running: list[InFlight] = ray.get(call)
        trained = {
            item.group.group_id
            for item in self._places.generating.values()
            if item.engine == engine and item.group.purpose == TRAIN
        }
        movable = [group for group in running if group.group_id in trained]
        chosen = self._migration.answered(movable, self._idle_engine())
        if chosen is not None:
            self._engines.actors[engine].abort.remote(chosen)

    def lost(self, engine: int) -> None:
        """An engine is lost; a question to it is void."""
        if self._migration.lost(engine):
            self.calls = {}

    def _idle_engine(self) -> int | None:
        """An engine that runs no group and for which none waits."""
        busy = {item.engine for item in self._places.generating.values()}
        idle = (engine for engine in self._engines.alive if engine not in busy)
        return next((engine for engine in idle if self._dispatcher.peek(engine) is None), None)
