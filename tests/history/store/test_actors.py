"""Shards as plain objects: what they learn about the run, and the measuring of returned prompts."""

import threading

import numpy as np
import pytest

from history.store.actors import Shard
from history.store.response_batch import ResponseBatch
from history.types import Epoch
from tests.support.responses import visit


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    monkeypatch.setattr("history.store.actors._this_process", lambda: None)


def come_back(shard: Shard, key: int, first_step: int) -> None:
    """Two complete visits of a prompt."""
    for step in (first_step, first_step + 1):
        shard.append(ResponseBatch.of((key, one) for one in visit(key, step, num_samples=1)))
        shard.note_rewards(step, {key: [1.0]})


def test_measurements_do_not_pile_up_while_one_runs(monkeypatch):
    begun, may_end, measured = threading.Event(), threading.Event(), []

    def share(before, now):
        begun.set()
        may_end.wait()
        measured.append(now[0].step)
        return 0.5

    monkeypatch.setattr("history.lengths.reuse.reusable_share", share)
    shard = Shard(0, 1, 1 << 24, 1)
    come_back(shard, 0, 0)
    begun.wait()
    num_submitted = len(shard._measuring)
    for step in range(2, 30_000):
        shard.append(ResponseBatch.of([(1, visit(1, step, num_samples=1)[0])]))
    come_back(shard, 2, 30_000)
    assert len(shard._measuring) <= num_submitted + 1
    may_end.set()
    shard._thread.shutdown()
    assert measured == [1, 30_001], "the last one returned while a measurement ran"
    assert len(shard.report().returns) == 2
    assert shard._measuring == []


class Measured:
    """A measurement, which counts comparisons."""

    num_compared = 0

    def __init__(self, is_done: bool) -> None:
        self.is_done, self.num_asked = is_done, 0

    def __eq__(self, other: object) -> bool:
        Measured.num_compared += 1
        return self is other

    __hash__ = None

    def done(self) -> bool:
        return self.is_done

    def result(self) -> None:
        self.num_asked += 1


def test_a_report_looks_at_each_measurement_once():
    shard = Shard(0, 1, 1 << 20, 1)
    pending = [Measured(number % 2 == 0) for number in range(300)]
    shard._measuring = list(pending)
    shard.report()
    assert Measured.num_compared == 0
    assert [one.num_asked for one in pending] == [int(one.is_done) for one in pending]
    assert [one.is_done for one in shard._measuring] == [False] * 150


def test_a_shard_knows_the_epochs_of_its_own_prompts():
    shard = Shard(1, 3, 1 << 20, 1)
    epochs = [
        Epoch(prompt_keys=np.array([1, 2, 4], dtype=np.int64), num_steps=7),
        Epoch(prompt_keys=np.array([6, 7], dtype=np.int64), num_steps=90),
    ]
    shard.note_epochs(epochs)
    assert shard._store._epochs == {1: 7, 4: 7, 7: 90}
