"""Asks full engines for free seats: an engine answers when enough of its responses have ended.

The answer is the number of responses that have ended since the engine's start (`EngineActor.ended_at_least`). An engine
is asked again only for fewer responses than before: its next group may need fewer seats than the one that it was asked
for.

Invariant: of two questions to one engine under way, the later one is for fewer responses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import ray

from rollout.pool.engine_call import EngineQuestion
from rollout.pool.engine_group import EngineGroup
from rollout.pool.seat_counts import SeatCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatQuestion(EngineQuestion):
    """Asks an engine to answer when `num_ended` of its responses have ended since its start."""

    num_ended: int


class SeatQuestions:
    """The questions under way. All methods mutate."""

    def __init__(self, engines: EngineGroup, seats: SeatCounts) -> None:
        """`seats` are the pool's; answers are counted there."""
        self._engines = engines
        self._seats = seats
        self.calls: dict[ray.ObjectRef, SeatQuestion] = {}
        """In the order of asking. Only the methods change it."""

    def ask(self, full: Mapping[int, int]) -> None:
        """Ask engines for so many ended responses each, where none is asked for as few already."""
        asked = {question.engine: question.num_ended for question in self.calls.values()}  # the last one counts
        for engine, num_ended in full.items():
            if engine not in asked or num_ended < asked[engine]:
                call = self._engines.actors[engine].ended_at_least.remote(num_ended)
                self.calls[call] = SeatQuestion(
                    engine=engine,
                    incarnation=self._engines.incarnations[engine],
                    method="ended_at_least",
                    num_ended=num_ended,
                )

    def answered(self, call: ray.ObjectRef) -> None:
        """An engine has answered: count the seats that are free.

        Raises:
            RayError: the call has failed.
            RuntimeError: another pool has used the engine.
        """
        question = self.calls.pop(call)
        num_ended: int = ray.get(call)
        self._seats.report(question.engine, num_ended)

    def forget(self, engine: int) -> None:
        """Questions to an engine are void: they count responses that it will not end."""
        self.calls = {call: question for call, question in self.calls.items() if question.engine != engine}
