"""Sends an engine's finished responses to the shards that own their prompts, outside the decode path.

Responses are collected for up to `DELAY_S`, or until a group is finished, and leave as one object per shard. No caller
waits for their arrival: batches to a dead shard are counted and dropped.

Invariant: every call returns at once; a response is sent at most once.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

import ray

from history.store.response_batch import ResponseBatch
from history.types import PastResponse, prompt_key
from rollout.types import FinishReason, GroupId, PromptGroup, TokenIds

DELAY_S = 0.2
"""Longest time for which a finished response waits for others."""


class HistorySender:
    """The sender of one engine; runs on its event loop."""

    def __init__(self, shards: Sequence[ray.actor.ActorHandle]) -> None:
        """`shards` are `history.store.actors.HistoryShard` handles, in shard order."""
        self._shards = tuple(shards)
        self._entries: list[tuple[int, PastResponse]] = []
        self._ended: Counter[GroupId] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self.num_lost_calls = 0
        """Batches that no shard received, since the start."""

    def put(self, group: PromptGroup, sample: int, response_ids: TokenIds, reason: FinishReason) -> None:
        """Queue a response that has ended; an aborted response is incomplete and is not sent."""
        if reason is not FinishReason.ABORT:
            response = PastResponse(token_ids=response_ids, step=group.step, sample=sample)
            self._entries.append((prompt_key(group.prompt.prompt_id), response))
        self._ended[group.group_id] += 1
        if self._ended[group.group_id] == len(group.seeds):
            del self._ended[group.group_id]
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self.flush)

    def flush(self) -> None:
        """Send all queued responses."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._entries:
            return
        batch, self._entries = ResponseBatch.of(self._entries), []
        for shard, part in zip(self._shards, batch.split(len(self._shards)), strict=True):
            if len(part):
                task = asyncio.get_running_loop().create_task(self._send(shard, part))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _send(self, shard: ray.actor.ActorHandle, batch: ResponseBatch) -> None:
        try:
            await shard.append.remote(batch)
        except ray.exceptions.RayError:
            self.num_lost_calls += 1
