"""Lets groups that arrive in any order enter an engine in a given order.

Calls to an actor may be reordered on their way. In a deterministic run the composition of batches must not depend on
timing: the groups of a step wait here until all are present, and then enter one after another in the caller's order.
"""

import asyncio
from collections.abc import Sequence

from rollout.types import GroupId


class OrderedStart:
    """The groups of one step; runs on the engine's event loop."""

    def __init__(self) -> None:
        self._turns: dict[GroupId, asyncio.Event] = {}
        self._entered: set[GroupId] = set()
        self._changed = asyncio.Condition()

    async def wait_for_turn(self, group_id: GroupId) -> None:
        """Return when this group may enter; call `enter` as soon as it has entered."""
        turn = self._turns[group_id] = asyncio.Event()
        async with self._changed:
            self._changed.notify_all()
        await turn.wait()

    async def enter(self, group_id: GroupId) -> None:
        """The group has entered or failed: the next group may enter."""
        async with self._changed:
            self._entered.add(group_id)
            self._changed.notify_all()

    async def admit(self, group_ids: Sequence[GroupId]) -> None:
        """Wait until all of `group_ids` are present, then let them enter in that order."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._turns.keys() >= set(group_ids))
        for group_id in group_ids:
            self._turns[group_id].set()
            async with self._changed:
                while group_id not in self._entered:
                    await self._changed.wait()
