"""Scorers in turn: each finished group goes to the next one; what is being scored is known by the call's reference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray

from rollout.types import ColumnsRef, GroupSummary, PromptGroup, Score, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    group: PromptGroup
    summary: GroupSummary
    columns: ray.ObjectRef


class ScorerPool:
    """All scorers of a run. `submit` and `finish` mutate."""

    def __init__(self, scorers: Sequence[ray.actor.ActorHandle]) -> None:
        """`scorers` are `rollout.scoring.ScorerActor` handles."""
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
        scorer = self._scorers[self._next]
        self._next = (self._next + 1) % len(self._scorers)
        self._scoring[scorer.score.remote(group, columns)] = _Scoring(group=group, summary=summary, columns=columns)

    def finish(self, ref: ray.ObjectRef) -> ScoredGroup:
        """Return the group of a call that has ended.

        Raises:
            RuntimeError: the scorer died or raised; the error names the group.
        """
        item = self._scoring.pop(ref)
        try:
            scores: tuple[Score, ...] = ray.get(ref)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"scoring of group {item.group.group_id} failed: {error}") from error
        return ScoredGroup(
            group=item.group,
            summary=item.summary,
            rewards=tuple(score.reward for score in scores),
            scores=scores,
            columns=ColumnsRef(item.columns),
        )
