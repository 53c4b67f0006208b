"""Orders of segments after faults: missing ones are built for their step. Shards and readers run in this process."""

import errno
import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray

from history import ray_wait
from history.patience import Patience
from history.store.actors import Reader, Shard
from history.store.response_batch import ResponseBatch
from history.store.service import HistoryService, Upkeep
from history.types import ActorProcess, Epoch, SegmentOrder, prompt_key
from tests.support.responses import visit

KEYS = tuple(prompt_key(f"test/{number}") for number in range(4))


@dataclass(eq=False)
class Ref:
    """A call's result, or its error."""

    value: object = None
    error: Exception | None = None
    of: "Handle | None" = None
    is_late: bool = False
    """It has not ended yet."""


@dataclass(eq=False)
class Handle:
    """The handle of an actor that runs in this process; a call ends before `remote` returns."""

    make: object
    actor: object = None
    is_reachable: bool = True
    is_slow: bool = False
    """Its calls end only when `ray.wait` says so."""
    calls: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.actor = self.make()

    def restart(self) -> None:
        """It dies, and Ray starts it again, empty."""
        self.actor = self.make()

    def __getattr__(self, name: str):
        return Method(self, name)


@dataclass
class Method:
    handle: Handle
    name: str

    def remote(self, *args) -> Ref:
        if not self.handle.is_reachable:
            return Ref(error=ray.exceptions.ActorDiedError())
        self.handle.calls.append(self.name)
        value = getattr(self.handle.actor, self.name)(*args)
        return Ref(value=value, of=self.handle, is_late=self.handle.is_slow)


def get(ref, timeout=None):
    if isinstance(ref, list):
        return [get(one) for one in ref]
    if ref.is_late:
        raise ray.exceptions.GetTimeoutError()
    if ref.error is not None:
        raise ref.error
    return ref.value


@dataclass
class Parts:
    service: HistoryService
    shard: Handle
    reader: Handle
    folder: Path

    def remember(self, step: int) -> None:
        batches = [ResponseBatch.of((key, one) for one in visit(key, step)) for key in KEYS]
        self.service.append_all(batches)

    def prefetch(self) -> None:
        self.service.publish_segments({"a": SegmentOrder(fresh=KEYS)})

    def place(self) -> None:
        self.service.publish_segments({"a": SegmentOrder(kept=KEYS)})

    def published(self) -> set[int]:
        return {int(path.stem, 16) for path in self.folder.glob("*.segment")}


@pytest.fixture
def parts(monkeypatch, tmp_path):
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (list(refs), []))
    monkeypatch.setattr("history.store.actors._this_process", lambda: None)
    shard = Handle(partial(Shard, 0, 1, 1 << 20, 1))
    folder = tmp_path / "segments"
    reader = Handle(partial(Reader, str(folder), 1 << 20))
    service = HistoryService(
        [shard],
        ["a"],
        start_reader=lambda node: reader,
        directory=str(folder),
        fingerprint="f",
        upkeep=Upkeep(log=lambda line: None),
    )
    yield Parts(service, shard, reader, folder)
    reader.actor.close()


def test_segments_that_could_not_be_fetched_are_built_when_the_groups_are_admitted(parts):
    parts.remember(0)
    parts.shard.is_reachable = False
    parts.prefetch()
    parts.shard.is_reachable = True
    assert parts.service.report().num_lost_calls == 1
    assert parts.published() == set()
    parts.place()
    assert parts.published() == set(KEYS)


def test_segments_are_built_once_a_shard_that_was_restarted_empty_is_refilled(parts, tmp_path):
    parts.remember(0)
    parts.service.save(tmp_path / "history")
    parts.service.saved(tmp_path / "history")
    parts.shard.restart()
    parts.prefetch()
    assert parts.published() == set()
    parts.service.report()
    assert parts.published() == set(KEYS), "while the trainer works"
    for path in parts.folder.glob("*.segment"):
        path.unlink()
    parts.reader.actor._stamps.clear()  # as if the reader had been faster than the refill
    parts.reader.actor._bytes.clear()
    parts.place()
    assert parts.published() == set(KEYS)


def test_an_order_that_no_report_has_confirmed_is_sent_again_and_a_confirmed_one_is_not(parts):
    parts.remember(0)
    parts.prefetch()
    parts.place()
    assert parts.reader.calls.count("publish") == 2
    parts.service.report()
    parts.place()
    assert parts.reader.calls.count("publish") == 2
    parts.service.add_segment("a", prompt_key("test/9"))
    parts.service.publish_segments({"a": SegmentOrder(kept=(*KEYS, prompt_key("test/9")))})
    assert parts.reader.calls.count("publish") == 3
    os.close(parts.reader.actor._lock)  # the folder's, which ends with a process
    parts.reader.restart()
    parts.service.report()
    parts.service.publish_segments({"a": SegmentOrder(kept=(*KEYS, prompt_key("test/9")))})
    assert parts.reader.calls.count("publish") == 5, "repeated after the restart, and unconfirmed"
    assert parts.published() == set(KEYS)


def test_a_restarted_shard_is_told_the_epochs_again(parts):
    parts.service.note_epochs([Epoch(prompt_keys=np.array(KEYS), num_steps=9)])
    assert parts.shard.actor._store._epochs == dict.fromkeys(KEYS, 9)
    parts.shard.restart()
    parts.service.report()
    assert parts.shard.actor._store._epochs == dict.fromkeys(KEYS, 9)


def test_a_batch_is_sent_when_the_one_before_is_stored_and_a_shard_that_hangs_ends_it(parts, monkeypatch):
    made, waited = [], []

    def batches():
        for key in KEYS:
            made.append(key)
            yield ResponseBatch.of((key, one) for one in visit(key, 0))

    def wait(refs, *, num_returns, timeout, fetch_local):
        if (len(made), num_returns) not in waited:  # the first of the looks of a wait
            waited.append((len(made), num_returns))
        return (refs, []) if len(waited) < 3 else ([], refs)

    monkeypatch.setattr(ray, "wait", wait)
    said = []
    parts.service._upkeep = Upkeep(log=said.append)
    parts.service.append_all(batches())
    assert waited == [(2, 1), (3, 1), (4, 1)], "one is stored while the next is made"
    assert parts.shard.calls.count("append") == 3
    assert said[0].startswith("a history shard has stored nothing for 120 s; what follows is left out;")


@dataclass
class Waits:
    """`ray.wait` over a clock: calls of the shard end in some looks only, all others at once."""

    shard: Handle
    ends_in: tuple[int, ...]
    """Looks, counted from 1."""
    stopped_s: dict[int, float] = field(default_factory=dict)
    """For which all processes are stopped in a look."""
    now_s: float = 0.0
    num_looks: int = 0

    def __call__(self, refs, *, num_returns, timeout, fetch_local=True):
        if timeout:
            self.num_looks += 1
            self.now_s += timeout + self.stopped_s.get(self.num_looks, 0.0)
            for ref in refs:
                ref.is_late = ref.of is self.shard and self.num_looks not in self.ends_in
        return [ref for ref in refs if not ref.is_late], [ref for ref in refs if ref.is_late]


@pytest.fixture
def slow_shard(parts, monkeypatch):
    """Have Ray wait so for the shard; returns the waits, the names of the actors that are ended, and the log."""

    def begin(*ends_in: int, stopped_s: dict[int, float]) -> tuple[Waits, list[str], list[str]]:
        ended, log, waits = [], [], Waits(parts.shard, ends_in, stopped_s)
        parts.service.report()
        for actor in parts.service._actors:
            actor.last = replace(actor.last, process=ActorProcess(node_id="", pid=1, start_ticks=0, host="n1"))
        parts.service._upkeep = Upkeep(log=log.append, end_hung=lambda name, process: ended.append(name))
        parts.shard.is_slow = True
        monkeypatch.setattr(ray, "wait", waits)
        monkeypatch.setattr(ray_wait, "Patience", partial(Patience, clock=lambda: waits.now_s))
        return waits, ended, log

    return begin


def test_a_shard_that_answers_after_a_stop_is_not_silent(parts, slow_shard):
    waits, ended, _ = slow_shard(3, stopped_s={2: 600.0})
    parts.service.report()
    waits.now_s += 130.0  # the rest of a step, in which nobody waits for it
    parts.service.report()
    assert ended == [] and waits.num_looks == 3
    assert not any(actor.silent_s for actor in parts.service._actors)


def test_only_time_in_which_reports_wait_for_a_shard_lets_it_count_as_hanging(parts, slow_shard):
    waits, ended, log = slow_shard(stopped_s={})
    for _ in range(23):
        parts.service.report()
        waits.now_s += 600.0
    assert ended == [] and len(log) == 1
    parts.service.report()
    assert ended == ["history shard 0"]
    assert log[1].startswith("history shard 0 (process 1 on n1) has not answered for 120 s and is restarted;")


def test_a_stop_in_a_save_costs_no_snapshot(parts, slow_shard, tmp_path):
    parts.remember(0)
    slow_shard(1, 4, stopped_s={2: 3600.0})
    parts.service.save(tmp_path / "history")
    assert (tmp_path / "history" / "manifest.json").exists()


def test_a_late_shard_that_still_writes_into_a_snapshot_ends_no_run(parts, slow_shard, tmp_path, monkeypatch):
    parts.remember(0)
    waits, _, log = slow_shard(1, stopped_s={})

    def rmdir(path, **_):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        parts.service.save(tmp_path / "history")
    assert waits.now_s == 605.0
    assert log[-1].startswith("the history could not be saved (a shard has not written its files in 600 s);")
    assert (tmp_path / "history").exists()
    parts.service.saved(tmp_path / "history")
    assert parts.service._newest == "", "what is left is no snapshot"
