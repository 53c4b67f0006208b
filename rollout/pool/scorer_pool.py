"""Scorers in turn: each finished group goes to the next one; what is being scored is known by the call's reference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray

from rollout.failures import CallError, Place, PlacedError, ProcessLostError, RewardBrokenError, brief, node_of
from rollout.types import ColumnsRef, GroupSummary, PromptGroup, Score, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    group: PromptGroup
    summary: GroupSummary
    columns: ray.ObjectRef
    scorer: int


class ScorerPool:
    """All scorers of a run. `submit` and `finish` mutate."""

    def __init__(self, scorers: Sequence[ray.actor.ActorHandle]) -> None:
        """`scorers` are `rollout.rewards.scorer.ScorerActor` handles."""
        self._scorers = tuple(scorers)
        self._scoring: dict[ray.ObjectRef, _Scoring] = {}
        self._next = 0

    def __iter__(self) -> Iterator[ray.ObjectRef]:
        """References of the calls that are under way."""
        return iter(self._scoring)

    def __len__(self) -> int:
        return len(self._scoring)

    def __contains__(self, ref: ray.ObjectRef) -> bool:
        return ref in self._scoring

    def groups(self) -> list[PromptGroup]:
        """What is being scored."""
        return [item.group for item in self._scoring.values()]

    def submit(self, group: PromptGroup, summary: GroupSummary, columns: ray.ObjectRef) -> None:
        """Have a finished group scored by whose turn it is."""
        number = self._next
        self._next = (self._next + 1) % len(self._scorers)
        scored = self._scorers[number].score.remote(group, columns)
        self._scoring[scored] = _Scoring(group=group, summary=summary, columns=columns, scorer=number)

    def finish(self, ref: ray.ObjectRef) -> ScoredGroup:
        """Return the group of a call that has ended.

        Errors name the group.

        Raises:
            RewardBrokenError: the reward function fails for every response.
            ProcessLostError: the scorer's process ended.
            CallError: the scorer raised something else.
        """
        item = self._scoring.pop(ref)
        try:
            scores: tuple[Score, ...] = ray.get(ref)
        except ray.exceptions.RayError as error:
            place = Place(role="scorer", ranks=(item.scorer,), node=node_of(error))
            raise _kind(error)(f"scoring of group {item.group.group_id} failed: {brief(error)}", place) from error
        return ScoredGroup(
            group=item.group,
            summary=item.summary,
            rewards=tuple(score.reward for score in scores),
            scores=scores,
            columns=ColumnsRef(item.columns),
        )


def _kind(error: ray.exceptions.RayError) -> type[PlacedError]:
    if isinstance(error, RewardBrokenError):
        return RewardBrokenError
    return ProcessLostError if isinstance(error, ray.exceptions.RayActorError) else CallError
