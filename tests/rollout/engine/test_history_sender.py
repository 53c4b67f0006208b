"""Finished responses are sent in batches, once, to the shard that owns their prompt, without blocking the engine."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import ray

from history.store.prompt_store import PromptStore
from history.types import PastResponse, prompt_key
from rollout.engine import history_sender
from rollout.engine.history_sender import HistorySender
from rollout.types import TRAIN, FinishReason, GroupId, PromptId
from tests.support.scored_groups import scored_group


class Shard:
    """Accepts calls like an actor handle: `append.remote` returns an awaitable."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.batches = []
        self.rewards = []
        self.append = self
        self.note_rewards = Noting(self)

    def remote(self, batch):
        self.batches.append(batch)
        return self.answer()

    async def answer(self):
        if self.error is not None:
            raise self.error

    def held(self):
        return [(key, one.step, one.sample) for batch in self.batches for key, one in batch.entries()]


class Noting:
    """The method `note_rewards` of such a handle."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def remote(self, step, rewards):
        self.shard.rewards.append((len(self.shard.held()), step, rewards))
        return self.shard.answer()


def group(number: int, num_samples: int = 4):
    made = scored_group(0).group
    prompt = replace(made.prompt, prompt_id=PromptId(f"math/{number}"))
    return replace(made, group_id=GroupId(number), prompt=prompt, step=7, seeds=tuple(range(num_samples)))


IDS = np.arange(5, dtype=np.int32)


def run(body) -> None:
    async def whole() -> None:
        await body()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(whole())


def test_a_group_is_sent_as_one_batch_when_the_engine_returns_it():
    shard = Shard()

    async def body():
        sender = HistorySender([shard])
        for sample in (2, 0, 3):
            sender.put(group(1), sample, IDS, FinishReason.STOP)
        assert shard.batches == []
        sender.put(group(1), 1, IDS, FinishReason.LENGTH)
        sender.end(group(1))
        await asyncio.sleep(0)
        assert len(shard.batches) == 1

    run(body)
    assert shard.held() == [(prompt_key("math/1"), 7, sample) for sample in (2, 0, 3, 1)]


def test_a_response_that_waits_too_long_is_sent_alone_and_only_once(monkeypatch):
    monkeypatch.setattr(history_sender, "DELAY_S", 0.01)
    shard = Shard()

    async def body():
        sender = HistorySender([shard])
        sender.put(group(1), 0, IDS, FinishReason.STOP)
        sender.put(group(2), 0, IDS, FinishReason.STOP)
        while not shard.batches:
            await asyncio.sleep(0.005)
        sender.flush()

    run(body)
    assert len(shard.batches) == 1
    assert sorted(shard.held()) == sorted((prompt_key(f"math/{number}"), 7, 0) for number in (1, 2))


def test_two_groups_of_a_prompt_in_one_step_send_responses_of_different_numbers():
    shard = Shard()
    again = replace(group(1), group_id=GroupId(2), occurrence=1)

    async def body():
        sender = HistorySender([shard])
        for sample in range(4):
            sender.put(group(1), sample, IDS, FinishReason.STOP)
            sender.put(again, sample, IDS, FinishReason.STOP)
        sender.end(group(1))
        sender.end(again)

    run(body)
    assert sorted(shard.held()) == [(prompt_key("math/1"), 7, sample) for sample in range(8)]


@pytest.mark.parametrize("purpose", [TRAIN, "math"])
def test_only_the_shard_of_an_evaluation_is_told_that_no_rewards_come_after_its_responses(purpose):
    shards = [Shard(), Shard()]

    async def body():
        sender = HistorySender(shards)
        for sample in range(3):
            sender.put(replace(group(1, 3), purpose=purpose), sample, IDS, FinishReason.STOP)
        sender.end(replace(group(1, 3), purpose=purpose))

    run(body)
    key = prompt_key("math/1")
    noted = [(3, 7, {key: (math.nan,) * 3})] if purpose != TRAIN else []
    assert shards[key % 2].rewards == noted and shards[1 - key % 2].rewards == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_evaluations_group_that_moved_between_engines_is_complete_with_its_last_response(order):
    """The first engine ends five of eight responses; the messages of either may come first."""
    moved, key = replace(group(1, 8), purpose="math"), prompt_key("math/1")
    shards = [Shard(), Shard()]

    async def body():
        first, second = (HistorySender([shard]) for shard in shards)
        for sample in range(8):
            first.put(moved, sample, IDS, FinishReason.STOP if sample < 5 else FinishReason.ABORT)
        first.end(moved)
        for sample in range(5, 8):
            second.put(moved, sample, IDS, FinishReason.STOP)
        second.end(moved)

    run(body)
    store = PromptStore(budget_bytes=1 << 20, kept_steps=1, reuse_share=lambda before, now: 0.0)
    store.append(key, [PastResponse(token_ids=IDS, step=3, sample=sample) for sample in range(8)])
    store.note_rewards(key, 3, [math.nan] * 8)
    for shard in (shards[number] for number in order):
        for batch in shard.batches:
            store.append(key, [response for _, response in batch.entries()])
        for _, step, rewards in shard.rewards:
            store.note_rewards(key, step, rewards[key])
    found = [(response.step, response.sample) for response in store.fetch([key])[key][1]]
    assert found == [(7, sample) for sample in range(8)], "it has not replaced the visit before"


def test_aborted_responses_are_not_sent():
    shard = Shard()

    async def body():
        sender = HistorySender([shard])
        sender.put(group(1, 2), 0, IDS, FinishReason.STOP)
        sender.put(group(1, 2), 1, IDS, FinishReason.ABORT)
        sender.end(group(1, 2))

    run(body)
    assert shard.held() == [(prompt_key("math/1"), 7, 0)]


@pytest.mark.parametrize("num_shards", [2, 3])
def test_every_prompt_is_sent_to_the_shard_that_owns_it(num_shards):
    shards = [Shard() for _ in range(num_shards)]

    async def body():
        sender = HistorySender(shards)
        for number in range(12):
            sender.put(group(number, 1), 0, IDS, FinishReason.STOP)
            sender.end(group(number, 1))

    run(body)
    assert sum(len(shard.held()) for shard in shards) == 12
    for owner, shard in enumerate(shards):
        assert {key % num_shards for key, _, _ in shard.held()} <= {owner}


def test_batches_lost_with_a_dead_shard_are_counted_and_the_living_shard_gets_its_batches():
    dead, living = Shard(ray.exceptions.ActorDiedError()), Shard()
    kept = []

    async def body():
        sender = HistorySender([dead, living])
        for number in range(12):
            sender.put(group(number, 1), 0, IDS, FinishReason.STOP)
            sender.end(group(number, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        kept.append(sender)

    run(body)
    assert kept[0].num_lost_calls == len(dead.batches) > 0
    assert len(living.held()) > 0
    assert kept[0]._sending == set()
