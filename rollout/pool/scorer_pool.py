"""Scorers in turn: each finished group goes to the next scorer."""

from collections.abc import Sequence

import ray

from rollout.failures import CallError, Place, PlacedError, ProcessLostError, RewardBrokenError, brief, node_of
from rollout.pool.group_places import Scoring
from rollout.types import ColumnsRef, PromptGroup, Score, ScoredGroup


class ScorerPool:
    """All scorers of a run. `submit` mutates."""

    def __init__(self, scorers: Sequence[ray.actor.ActorHandle]) -> None:
        """`scorers` are `rollout.rewards.text_actor.TextActor` handles."""
        self._scorers = tuple(scorers)
        self._next = 0

    def submit(self, group: PromptGroup, columns: ColumnsRef) -> tuple[ray.ObjectRef, int]:
        """Start scoring a finished group; returns the call and the number of its scorer."""
        number = self._next
        self._next = (self._next + 1) % len(self._scorers)
        return self._scorers[number].score.remote(group, columns), number

    def finish(self, ref: ray.ObjectRef, item: Scoring) -> ScoredGroup:
        """Return the group of a call that has ended.

        Errors name the group.

        Raises:
            RewardBrokenError: the reward function fails for every response.
            ProcessLostError: the scorer's process ended.
            CallError: the scorer raised something else.
        """
        try:
            scores: tuple[Score, ...] = ray.get(ref)
        except ray.exceptions.RayError as error:
            place = Place(role="scorer", ranks=(item.scorer,), node=node_of(error))
            raise _kind(error)(f"scoring of group {item.group.group_id} failed: {brief(error)}", place) from error
        return ScoredGroup(
            group=item.group,
            summary=item.sampled.summary,
            rewards=tuple(score.reward for score in scores),
            scores=scores,
            columns=item.sampled.columns,
        )


def _kind(error: ray.exceptions.RayError) -> type[PlacedError]:
    if isinstance(error, RewardBrokenError):
        return RewardBrokenError
    return ProcessLostError if isinstance(error, ray.exceptions.RayActorError) else CallError
