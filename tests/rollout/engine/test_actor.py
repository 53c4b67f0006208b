"""Calls of an engine's actor that need no engine."""

import asyncio

from rollout.engine.actor import EngineActor
from tests.support.scored_groups import scored_group

SCORED = scored_group(0)


class Engine:
    async def generate_group(self, group, summary, columns):
        return SCORED.summary, SCORED.columns[0]


class Sender:
    def __init__(self) -> None:
        self.ended = []

    def end(self, group) -> None:
        self.ended.append(group.group_id)


def test_the_history_is_told_of_every_group_that_the_engine_returns():
    actor_class = EngineActor.__ray_metadata__.modified_class
    actor = actor_class.__new__(actor_class)
    actor._engine, actor._history_sender = Engine(), None
    assert asyncio.run(actor.generate_group(SCORED.group))[0] is SCORED.summary
    actor._history_sender = Sender()
    asyncio.run(actor.generate_group(SCORED.group))
    assert actor._history_sender.ended == [SCORED.group.group_id]
