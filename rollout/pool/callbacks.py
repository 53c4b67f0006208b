"""What a pool of engines tells its users, and what it asks them."""

from collections.abc import Callable
from typing import Protocol

from rollout.types import GroupId, PromptGroup, ScoredGroup

Progress = Callable[[int, int], None]
"""Called with (groups scored, groups waited for) whenever a group is scored."""

OnStart = Callable[[PromptGroup, int], None]
"""Called with a group and the number of the engine that begins or continues it."""


class Batches(Protocol):
    """Decides which groups are trained on together (`rollout.planning.planner.Planner`)."""

    def started(self, group_id: GroupId) -> None:
        """An engine has begun a group."""
        ...

    def completed(self, scored: ScoredGroup) -> None:
        """A group is sampled and scored."""
        ...

    def batch(self, step: int) -> list[GroupId] | None:
        """The groups of a step's batch; None while the batch is incomplete."""
        ...

    def progress(self, step: int) -> tuple[int, int]:
        """(groups of the batch that are complete, groups that the batch needs); equal only if the batch is complete"""
        ...


def ignore_start(group: PromptGroup, engine: int) -> None:
    """For a pool whose starts nobody follows."""
    del group, engine


def tell(progress: Progress | None, done: int, total: int) -> None:
    """Call `progress`, if there is one."""
    if progress is not None:
        progress(done, total)
