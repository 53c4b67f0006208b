"""Follows which engines are lost and which serve again, for the queues, seats and questions of a pool.

`EngineGroup` records losses and replacements at any time: the pool reports calls that fail, and somebody else restarts
engines. `follow` acts on what has changed since its last call:

    an engine is lost           its waiting groups move to other engines, its seats are reset, questions to it are void
    another took its number     the same, and then its queue is open again

A call may fail after its engine was replaced. So each call carries its engine's incarnation, and the death of an
earlier one is no loss of its successor.

A deterministic run cannot go on elsewhere: groups share forwards, and its step is sampled again (StepLostError).
"""

import logging
from dataclasses import dataclass, field

import ray

from rollout.failures import CallError, Place, StepLostError, brief, node_of
from rollout.planning.dispatcher import Dispatcher
from rollout.pool.engine_group import EngineGroup
from rollout.pool.group_places import Generating
from rollout.pool.migration_survey import MigrationSurvey
from rollout.pool.seat_counts import SeatCounts
from rollout.pool.seat_questions import SeatQuestions
from rollout.types import GroupId

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EngineLosses:
    """Losses of a pool's engines; the fields are the pool's. All methods but the checks mutate."""

    engines: EngineGroup
    dispatcher: Dispatcher
    seats: SeatCounts
    seat_questions: SeatQuestions
    survey: MigrationSurvey
    whole_step: bool
    """Whether the run is deterministic."""
    closed: frozenset[int] = field(default=frozenset(), init=False)
    """Lost engines whose queues are closed."""
    _incarnations: tuple[int, ...] = field(init=False)
    """Engines as `follow` has seen them last."""

    def __post_init__(self) -> None:
        self._incarnations = self.engines.incarnations

    def follow(self) -> None:
        """Close the queues of engines that are lost, and open those of engines that serve again."""
        # losses are read first: an engine that is replaced in between still counts as lost, until the next call
        lost, now = frozenset(self.engines.lost), self.engines.incarnations
        replaced = {engine for engine, known in enumerate(self._incarnations) if now[engine] != known}
        self._incarnations = now
        for engine in (lost | replaced) - self.closed:
            self.dispatcher.close(engine)
            self.seat_questions.forget(engine)
            self.seats.reset(engine)
            self.survey.lost(engine)
        for engine in (self.closed | replaced) - lost:
            self.dispatcher.open(engine)
        self.closed = lost

    def call_failed(self, engine: int, incarnation: int, action: str, error: ray.exceptions.RayError) -> None:
        """A call has failed, so its engine has died.

        Raises:
            CallError: the engine lives and has raised; the message names it and `action`.
            StepLostError: the engine has died, in a deterministic run.
        """
        if not isinstance(error, ray.exceptions.RayActorError):
            place = Place(role="engine", ranks=(engine,), node=node_of(error))
            raise CallError(f"engine {engine}: {action} failed: {brief(error)}", place) from error
        self.died(engine, incarnation, error)

    def died(self, engine: int, incarnation: int, error: Exception) -> None:
        """An incarnation of an engine has died; its successor, if there is one already, is not lost.

        Raises:
            StepLostError: in a deterministic run.
        """
        if self.engines.incarnations[engine] == incarnation:
            self.engines.mark_lost(engine, brief(error))
            self.check_step(error)
        self.follow()

    def free_seats(self, item: Generating) -> None:
        """The call of a group has returned, so all its responses have ended."""
        if self._has_seats(item):
            self.seats.returned(item.engine, len(item.group.seeds))

    def take_back_seats(self, item: Generating) -> None:
        """A group never reached its engine."""
        if self._has_seats(item):
            self.seats.take_back(item.engine, len(item.group.seeds))
            self.seat_questions.forget(item.engine)

    def _has_seats(self, item: Generating) -> bool:
        """Whether the seats of a group count still: not if its engine was lost since, so that they were reset."""
        return item.engine not in self.closed and self.engines.incarnations[item.engine] == item.incarnation

    def check_step(self, error: Exception | None = None) -> None:
        """Raise StepLostError if the engine of a deterministic run is lost; `error` says so first."""
        if self.whole_step and (lost := self.engines.lost):
            raise StepLostError(
                f"engine {lost[0]} died, and a deterministic run samples the whole step again: "
                f"{self.engines.loss_reason(lost[0])}",
                Place(role="engine", ranks=lost, node="" if error is None else node_of(error)),
            ) from error

    def check_tokens(self, group_id: GroupId, error: Exception) -> None:
        """Say that a group's tokens are lost with a node; StepLostError in a deterministic run."""
        why = f"the tokens of group {group_id} were lost with a node"
        if self.whole_step:
            raise StepLostError(
                f"{why}, and a deterministic run samples the whole step again", Place(role="engine")
            ) from error
        _log.warning("%s; it is sampled again", why)
