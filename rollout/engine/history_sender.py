"""Sends an engine's finished responses to the shards that own their prompts, outside the decode path.

Responses are collected for up to `DELAY_S`, or until the engine returns a group, and leave as one object per shard. No
caller waits for their arrival: batches to a dead shard are counted and dropped.

Rewards of training groups come from the controller, which completes their visits. Those of an evaluation are not kept,
so the sender says that none will come. A group that moves between engines is returned by each; the visit is complete
when all its responses have arrived.

Invariant: every call returns at once; a response is sent at most once.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import ray

from history.store.response_batch import ResponseBatch
from history.types import PastResponse, prompt_key
from rollout.types import TRAIN, FinishReason, PromptGroup, TokenIds

DELAY_S = 0.2
"""Longest time for which a finished response waits for others."""


class HistorySender:
    """The sender of one engine; runs on its event loop."""

    def __init__(self, shards: Sequence[ray.actor.ActorHandle]) -> None:
        """`shards` are `history.store.actors.HistoryShard` handles, in shard order."""
        self._shards = tuple(shards)
        self._entries: list[tuple[int, PastResponse]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self.num_lost_calls = 0
        """Calls that no shard received, since the start."""

    def put(self, group: PromptGroup, sample: int, response_ids: TokenIds, reason: FinishReason) -> None:
        """Queue a response that has ended; an aborted response is incomplete and is not sent."""
        if reason is FinishReason.ABORT:
            return
        response = PastResponse(token_ids=response_ids, step=group.step, sample=group.first_in_visit + sample)
        self._entries.append((prompt_key(group.prompt.prompt_id), response))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self.flush)

    def end(self, group: PromptGroup) -> None:
        """The engine returns a group, of which another engine may have sampled a part, or may continue one."""
        self.flush()
        if group.purpose != TRAIN:
            self._end_visit(group)

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
                self._start(partial(shard.append.remote, part))

    def _end_visit(self, group: PromptGroup) -> None:
        """Tell the shard that an evaluation's group has no rewards, so that its visit replaces older ones."""
        key = prompt_key(group.prompt.prompt_id)
        shard = self._shards[key % len(self._shards)]
        none = (math.nan,) * (group.first_in_visit + len(group.seeds))
        self._start(partial(shard.note_rewards.remote, group.step, {key: none}))

    def _start(self, call: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._send(call))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except ray.exceptions.RayError:
            self.num_lost_calls += 1
