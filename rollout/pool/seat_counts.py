"""How many seats of each engine are in use, by groups that have returned and by the engines' own reports. No Ray.

Seats become free response by response. The pool counts the responses that it has begun. An engine that is asked
reports how many have ended since its start. Nobody asks while no group waits; all responses of a group have ended when
its call returns, so at least these seats are known to be free.

Invariant (`check_integrity`): an engine has ended at least the responses of groups that have returned, and at most
those that the pool has begun.
"""


class SeatCounts:
    """Seats of all engines. `begin`, `take_back`, `returned`, `report` and `reset` mutate."""

    def __init__(self, num_engines: int, *, seats_per_engine: int) -> None:
        self.seats_per_engine = seats_per_engine
        self._begun = [0] * num_engines
        self._ended = [0] * num_engines
        self._returned = [0] * num_engines
        """By engine, responses of groups whose call has returned."""

    def used(self, engine: int) -> int:
        """Seats in use, as far as the pool knows."""
        return self._begun[engine] - self._ended[engine]

    def free(self, engine: int) -> int:
        """Seats not in use; negative while responses wait for a seat inside the engine."""
        return self.seats_per_engine - self.used(engine)

    def num_ended_for(self, engine: int, num_free: int) -> int:
        """How many responses must have ended, since the engine's start, before `num_free` seats are free."""
        return self._begun[engine] - (self.seats_per_engine - num_free)

    def begin(self, engine: int, num_responses: int) -> None:
        """The pool has begun responses on an engine."""
        self._begun[engine] += num_responses

    def take_back(self, engine: int, num_responses: int) -> None:
        """Responses that were begun never reached the engine, which will not count them."""
        self._begun[engine] -= num_responses

    def returned(self, engine: int, num_responses: int) -> None:
        """The call of a group of so many responses has returned, so all of them have ended."""
        self._returned[engine] += num_responses
        self._ended[engine] = max(self._ended[engine], self._returned[engine])

    def report(self, engine: int, num_ended: int) -> None:
        """An engine has ended so many responses since its start; a report may be older than what is known.

        Raises:
            RuntimeError: more than this pool began: another pool has used the engine.
        """
        self._ended[engine] = max(self._ended[engine], num_ended)
        if num_ended > self._begun[engine]:
            raise RuntimeError(
                f"engine {engine} has ended {num_ended} responses, of which this pool began {self._begun[engine]}: "
                "an engine has one pool, from its start on"
            )

    def reset(self, engine: int) -> None:
        """An engine is lost; its successor counts from 0."""
        self._begun[engine] = self._ended[engine] = self._returned[engine] = 0

    def check_integrity(self) -> None:
        """Assert the invariant."""
        for begun, ended, returned in zip(self._begun, self._ended, self._returned, strict=True):
            assert 0 <= returned <= ended <= begun, "more responses have returned than ended, or ended than were begun"
