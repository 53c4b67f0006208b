"""Shards and readers as plain objects: what shards learn about the run, and folders that readers make again."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from history.index import segments_dir
from history.index.segment import attach_segment
from history.store import actors
from history.store.actors import Reader, Shard
from history.store.response_batch import ResponseBatch
from history.types import Epoch, SegmentOrder
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


class Shards:
    """A shard as a reader calls it: an answer is there at once, after `before_answer`."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.before_answer: Callable[[], object] = lambda: None

    @property
    def fetch(self) -> "Shards":
        return self

    def remote(self, *arguments: object) -> object:
        self.before_answer()
        return self.shard.fetch(*arguments)


@pytest.fixture
def shard(monkeypatch) -> Shards:
    monkeypatch.setattr(actors.ray, "get", lambda answer, timeout: answer)
    filled = Shard(0, 1, 1 << 24, 1)
    for key in range(6):
        filled.append(ResponseBatch.of((key, one) for one in visit(key, 0)))
    return Shards(filled)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(segments_dir, "SHM", tmp_path)
    return tmp_path / "mrl-history-run-1"


def published(folder: Path) -> set[int]:
    return {key for key in range(6) if attach_segment(folder, key) is not None}


@pytest.mark.parametrize("removed", ["the folder", "its lock"])
def test_a_folder_that_was_removed_is_made_again_by_the_next_order_with_all_its_segments(folder, shard, removed):
    reader = Reader(str(folder), 1 << 24)
    reader.publish(SegmentOrder(kept=(0,), fresh=(1, 2)), [shard])
    num_bytes = reader.report().num_bytes
    for orders in ({"kept": (1,), "fresh": (0, 3)}, {"kept": (1, 3, 4)}):
        if removed == "the folder":
            shutil.rmtree(folder)
        else:
            (folder / "LOCK").unlink()
        reader.publish(SegmentOrder(**orders), [shard])
        assert published(folder) == SegmentOrder(**orders).keys
    report = reader.report()
    assert (report.num_segments, report.num_bytes, report.num_failures) == (3, num_bytes, 2)
    assert segments_dir.sweep_segments() == [], "the reader holds the lock"
    os.close(reader._lock)
    assert segments_dir.sweep_segments() == [folder]


def test_a_prompt_that_is_added_to_a_removed_folder_brings_those_of_the_order_back(folder, shard):
    reader = Reader(str(folder), 1 << 24)
    reader.publish(SegmentOrder(kept=(0,), fresh=(1,)), [shard])
    shutil.rmtree(folder)
    reader.add([5], [shard])
    assert published(folder) == {0, 1, 5}
    assert reader.report().num_failures == 1
    reader.add([4], [shard])
    assert (published(folder), reader.report().num_failures) == ({0, 1, 4, 5}, 1)


def test_a_folder_that_is_removed_while_prompts_are_fetched_is_a_failure_and_ends_no_call(folder, shard):
    """A report without failures would mean that the order has been carried out, and it would not be repeated."""
    reader = Reader(str(folder), 1 << 24)
    order = SegmentOrder(fresh=(0, 1))
    shard.before_answer = lambda: shutil.rmtree(folder)
    reader.publish(order, [shard])
    assert (reader.report().num_segments, reader.report().num_failures) == (0, 2)
    shard.before_answer = lambda: None
    reader.publish(order, [shard])
    assert published(folder) == {0, 1}


def test_a_process_tells_the_same_of_itself_after_the_clock_was_set(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"get_node_id": lambda self: "n"})())
    before = actors._this_process()
    booted_s = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + 2.0)
    assert actors._this_process() == before
