"""Shards and readers as Ray actors: responses return as segments; a dead actor costs drafts and is restarted."""

import itertools
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from history.config import HistoryConfig
from history.index.segment import attach_segment
from history.index.segments_dir import SHM, segments_dir, sweep_segments
from history.store import service as history_service
from history.store.actors import HistoryReader, HistoryShard, Reader
from history.store.response_batch import ResponseBatch
from history.store.service import HistoryService, Upkeep
from history.store.snapshot import SnapshotError, read_manifest
from history.store.start import start_history
from history.types import SegmentOrder, folder_of_node, prompt_key
from rollout.processes import STACKS_SIGNAL
from rollout.stacks import catches
from tests.support.deadline import DEADLINE_S
from tests.support.responses import is_right, visit

pytestmark = pytest.mark.usefixtures("running")
KEYS = [prompt_key(f"test/{number}") for number in range(12)]


class Log(list):
    def __call__(self, line: str) -> None:
        self.append(line)


@pytest.fixture
def log_lines() -> Log:
    return Log()


@pytest.fixture
def started(log_lines):
    services = []

    def start(name: str, end_hung=None, **changes) -> HistoryService:
        config = HistoryConfig(**{"num_shards": 2, "budget_bytes": 1 << 20, "shm_bytes": 1 << 20, **changes})
        upkeep = Upkeep(log=log_lines, end_hung=end_hung)
        services.append(
            start_history(config, directory=segments_dir(name), fingerprint="f", environment={}, upkeep=upkeep)
        )
        await_start(services[-1])
        return services[-1]

    yield start
    for service in services:
        service.close()
        assert not [path for path in SHM.iterdir() if path.name.startswith(Path(service.directory).name)]


def await_start(service: HistoryService) -> None:
    """Wait until every actor has a process: on a busy machine that takes longer than a report waits."""
    ray.get([actor.handle.__ray_ready__.remote() for actor in service._actors])


def remember(service: HistoryService, step: int, keys=KEYS) -> None:
    service.append_all([ResponseBatch.of((key, one) for key in keys for one in visit(key, step))])


def until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def publish(service: HistoryService, keys) -> None:
    """Order the newest segments of these prompts on every node."""
    service.publish_segments({node: SegmentOrder(fresh=tuple(keys)) for node in service.nodes})


def folder_of(service: HistoryService) -> Path:
    """The folder of a service's only reader."""
    (node,) = service.nodes
    return Path(folder_of_node(service.directory, node))


def published(service: HistoryService) -> set[int]:
    return {int(path.stem, 16) for path in folder_of(service).glob("*.segment")}


def published_step(service: HistoryService, key: int) -> int:
    segment = attach_segment(folder_of(service), key)
    if segment is None:
        return -1
    segment.check_integrity()
    found = segment.past_responses()
    assert len(found) == 4
    assert all(is_right(key, one) for one in found)
    return found[0].step


def kill(actor: ray.actor.ActorHandle, number: signal.Signals = signal.SIGKILL) -> None:
    pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, number)


def test_requested_prompts_are_published_with_the_right_tokens_and_others_are_removed(started, log_lines):
    service = started("wanted")
    remember(service, 0)
    service.note_rewards(0, {key: [0.0, 1.0, 0.5, 0.25] for key in KEYS})
    publish(service, [*KEYS[:8], KEYS[0], prompt_key("unknown/0")])
    until(lambda: published(service) == set(KEYS[:8]))
    assert {published_step(service, key) for key in KEYS[:8]} == {0}
    rewards = [one.reward for one in attach_segment(folder_of(service), KEYS[0]).past_responses()]
    assert rewards == [0.0, 1.0, 0.5, 0.25]
    untouched = (folder_of(service) / f"{KEYS[7]:016x}.segment").stat().st_ino
    remember(service, 1, KEYS[:7])
    service.note_rewards(1, dict.fromkeys(KEYS[:7], [0.0] * 4))
    publish(service, KEYS[6:10])
    until(lambda: [published_step(service, key) for key in KEYS[6:10]] == [1, 0, 0, 0])
    assert published(service) == set(KEYS[6:10])
    assert (folder_of(service) / f"{KEYS[7]:016x}.segment").stat().st_ino == untouched
    report, returns = service.report(), []
    assert report.stats.num_prompts == 12
    assert report.stats.num_responses == 48
    assert report.num_segments == 4
    until(lambda: returns.extend(report.returns) or returns.extend(service.report().returns) or len(returns) >= 7)
    assert report.num_lost_calls == 0
    assert log_lines == []


def test_prompts_that_are_needed_last_have_no_segment_beyond_the_budget_and_that_is_said_once(started, log_lines):
    page = mmap.PAGESIZE
    service = started("budget", num_shards=1, shm_bytes=3 * page)  # a segment of these prompts is one page
    remember(service, 0)
    publish(service, KEYS[:5])
    until(lambda: service.report().num_left_out == 2)
    assert published(service) == set(KEYS[:3])
    assert service.report().segment_bytes == 3 * page
    publish(service, [KEYS[8], *KEYS[:3]])  # the last of them gives way
    until(lambda: published(service) == {KEYS[8], KEYS[0], KEYS[1]})
    publish(service, [KEYS[8], KEYS[3]])  # there is room again
    until(lambda: published(service) == {KEYS[8], KEYS[3]})
    until(lambda: service.report().segment_bytes == 2 * page)
    assert service.report().num_left_out == 3
    assert [line for line in log_lines if "no room" in line] == [
        "2 segment(s) of the history have no room in /dev/shm and give no drafts; raise `history.shm_bytes`, or "
        "enlarge /dev/shm; metric history/left_out_segments counts further ones"
    ]


def test_a_reader_writes_no_segment_where_shared_memory_is_full(tmp_path, monkeypatch):
    """A full file system is one whose free bytes are few; a file that fits replaces its older version."""
    reader = Reader(str(tmp_path / "segments"), 1 << 30)
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, mmap.PAGESIZE))
    reader._places = {1: 0, 2: 1}
    for key in (1, 2):
        reader._publish_one(key, 5, visit(key, 0))
    assert reader.report().num_segments == 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, mmap.PAGESIZE - 1))
    reader._publish_one(1, 6, visit(1, 1))
    assert (reader.report().num_left_out, reader.report().num_failures) == (2, 0)
    assert reader.report().num_bytes == 0 and not list((tmp_path / "segments").glob("*.segment"))
    reader.close()


def test_a_killed_shard_is_detected_logged_once_and_refilled_from_the_newest_snapshot(started, log_lines, tmp_path):
    service = started("shard", num_shards=1)
    remember(service, 0)
    service.save(tmp_path / "history")
    service.saved(tmp_path / "history")
    remember(service, 1, KEYS[:1])
    service.report()
    kill(service.shards[0])
    until(lambda: service.report() and any("died" in line for line in log_lines))
    until(lambda: service.report().stats.num_prompts == len(KEYS))
    assert [line for line in log_lines if "died" in line] == [
        "history shard 0 died and was restarted; engines draft from the remaining history"
    ]
    assert service.report().num_lost_calls >= 1
    publish(service, KEYS)
    until(lambda: published(service) == set(KEYS))
    assert {published_step(service, key) for key in KEYS} == {0}
    remember(service, 2, KEYS[:1])
    service.note_rewards(2, {KEYS[0]: [1.0] * 4})
    publish(service, KEYS[:1])
    until(lambda: published_step(service, KEYS[0]) == 2)


@pytest.mark.parametrize("by_ray", [True, False])
def test_a_shard_that_hangs_is_restarted_and_delays_a_save_no_longer(started, log_lines, tmp_path, monkeypatch, by_ray):
    ended = []

    def end_hung(name, process):
        ended.append((name, process.pid, catches(psutil.Process(process.pid), STACKS_SIGNAL)))
        os.kill(process.pid, signal.SIGKILL)

    service = started("hung", None if by_ray else end_hung, num_shards=1)
    until(lambda: service.report() and service._actors[0].last is not None)
    pid = service._actors[0].last.process.pid
    remember(service, 0)
    service.save(tmp_path / "history")
    service.saved(tmp_path / "history")
    kill(service.shards[0], signal.SIGSTOP)
    monkeypatch.setattr(history_service, "REPORT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(history_service, "HANG_S", 2.0)
    service.save(tmp_path / "next")
    monkeypatch.undo()
    named = f"history shard 0 (process {pid} on {socket.gethostname()})"
    assert any(line.startswith(f"{named} has not answered for 2 s and is restarted") for line in log_lines)
    assert ended == ([] if by_ray else [("history shard 0", pid, True)])
    until(lambda: service.report().stats.num_prompts == len(KEYS) and any("died and was" in line for line in log_lines))
    service.save(tmp_path / "last")
    assert (tmp_path / "last" / "manifest.json").exists()


def test_a_shard_restarted_empty_does_not_replace_a_snapshot(started, log_lines, tmp_path):
    service = started("unsaved", num_shards=1)
    remember(service, 0)
    service.save(tmp_path / "0")
    service.saved(tmp_path / "0")
    kill(service.shards[0])
    attempts = 0
    while not (tmp_path / f"{attempts}" / "manifest.json").exists() or attempts == 0:
        attempts += 1
        service.save(tmp_path / f"{attempts}")
        service.saved(tmp_path / f"{attempts}")
        assert attempts < 1000
    manifest = read_manifest(tmp_path / f"{attempts}")
    assert sum(file.num_tokens for file in manifest.files) == 12 * 48
    assert any("could not be saved" in line for line in log_lines) or attempts == 1


def test_a_restarted_reader_publishes_the_last_requested_prompts_again(started, log_lines):
    service = started("reader")
    remember(service, 0)
    publish(service, KEYS[:3])
    until(lambda: published(service) == set(KEYS[:3]))
    service.report()
    (reader,) = service._readers.values()
    kill(reader)
    until(lambda: service.report() and any("reader 0 died" in line for line in log_lines))
    until(lambda: published(service) == set(KEYS[:3]))
    until(lambda: service.report().num_segments == 3)


def test_calls_to_a_dead_shard_are_counted_as_lost_without_blocking(started):
    service = started("orders", num_shards=1)
    service.report()
    for shard in service.shards:
        kill(shard)
    began = time.monotonic()
    for step in range(20):
        remember(service, step)
        service.note_rewards(step, dict.fromkeys(KEYS, [0.0] * 4))
        publish(service, KEYS)
    assert time.monotonic() - began < 60  # an order that waits for an answer would wait for its deadline
    until(lambda: service.report().num_lost_calls > 0)
    step = itertools.count(20)

    def serves_again() -> bool:  # each step orders anew, and calls are lost until Ray has started the shard again
        remember(service, next(step))
        publish(service, KEYS)
        time.sleep(0.2)
        return published(service) == set(KEYS)

    until(serves_again)


def test_a_snapshot_is_restored_to_any_number_of_shards(started, tmp_path):
    folder = tmp_path / "history"
    service = started("saved", num_shards=1)
    remember(service, 4)
    service.save(folder)
    assert read_manifest(folder).last_step == 4
    other = started("restored", num_shards=2)
    other.restore(folder)
    until(lambda: other.report().stats.num_prompts == len(KEYS))
    publish(other, KEYS)
    until(lambda: published(other) == set(KEYS))
    assert {published_step(other, key) for key in KEYS} == {4}


def test_a_damaged_snapshot_or_one_of_another_tokenizer_is_refused_and_named(started, tmp_path):
    folder = tmp_path / "history"
    service = started("refused")
    remember(service, 0)
    service.save(folder)
    name = read_manifest(folder).files[0].name
    (folder / name).write_bytes(b"junk")
    with pytest.raises(SnapshotError, match=name):
        service.restore(folder)
    service._fingerprint = "g"
    with pytest.raises(SnapshotError, match="another tokenizer"):
        service.warm_start(folder, KEYS)


def test_shared_memory_of_killed_runs_is_swept_and_that_of_live_runs_is_not(started):
    service = started("living", num_shards=1)
    until(lambda: folder_of(service).exists())
    code = (
        "from history.index.segments_dir import claim, segments_dir; from pathlib import Path; "
        "path = Path(segments_dir('killed')); kept = claim(path); (path / 'x.segment').touch(); print(path)"
    )
    path = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    assert (path / "x.segment").exists()
    assert path in sweep_segments()
    assert not path.exists()
    assert folder_of(service).exists()


def test_the_service_handle_does_not_import_numba():
    code = "import history.store.start, sys; print([name for name in ('numba', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def two_readers(tmp_path, log_lines):
    """A service with readers on the nodes `a` and `b`, which share a host and its memory."""
    shard, directory = HistoryShard.remote(0, 1, 1 << 20, 1), str(tmp_path / "run")
    service = HistoryService(
        [shard],
        ["a", "b"],
        start_reader=lambda node: HistoryReader.options(max_restarts=-1).remote(
            folder_of_node(directory, node), 1 << 20
        ),
        directory=directory,
        fingerprint="f",
        upkeep=Upkeep(log=log_lines),
    )
    await_start(service)
    yield service
    service.close()
    assert not list(tmp_path.glob("run-*"))


def test_a_reader_builds_the_segments_of_its_own_node_only(two_readers, tmp_path, log_lines):
    service = two_readers
    remember(service, 0)
    service.publish_segments({"a": SegmentOrder(fresh=tuple(KEYS[:8])), "b": SegmentOrder(fresh=tuple(KEYS[8:]))})
    until(lambda: service.report().num_segments == len(KEYS))
    assert on_node(tmp_path, "a") == set(KEYS[:8]) and on_node(tmp_path, "b") == set(KEYS[8:])
    assert service.report().num_built == len(KEYS)  # 8 and 4; every reader would have built 12
    service.add_segment("b", KEYS[0])
    until(lambda: on_node(tmp_path, "b") == {KEYS[0], *KEYS[8:]})
    assert service.report().num_built == len(KEYS) + 1
    kill(service._readers["b"])
    until(lambda: service.report() and any("reader 1 died" in line for line in log_lines))
    until(lambda: on_node(tmp_path, "b") == {KEYS[0], *KEYS[8:]})
    until(lambda: service.report().num_segments == len(KEYS) + 1)


def test_a_kept_segment_is_built_only_if_it_is_missing(two_readers, tmp_path):
    service = two_readers
    remember(service, 0)
    service.publish_segments({"a": SegmentOrder(fresh=tuple(KEYS[:2]))})
    until(lambda: service.report().num_built == 2)
    remember(service, 1)  # responses of requests that run
    service.publish_segments({"a": SegmentOrder(kept=tuple(KEYS[:3]), fresh=tuple(KEYS[3:4]))})
    until(lambda: on_node(tmp_path, "a") == set(KEYS[:4]))
    assert service.report().num_built == 4
    past = [attach_segment(tmp_path / "run-a", key).past_responses() for key in KEYS[:4]]
    assert [max(one.step for one in responses) for responses in past] == [0, 0, 1, 1]
    service.publish_segments({"a": SegmentOrder(fresh=tuple(KEYS[:1]))})
    until(lambda: service.report().num_built == 5)
    assert on_node(tmp_path, "a") == {KEYS[0]}


def test_a_reader_whose_segments_stay_as_they_are_gets_no_call(two_readers, tmp_path):
    service = two_readers
    remember(service, 0)
    service.publish_segments({"a": SegmentOrder(fresh=tuple(KEYS[:2]))})
    until(lambda: service.report().num_built == 2 and all(service._fulfilled.get(node) for node in "ab"))
    num_calls = len(service._pending)
    service.publish_segments({"a": SegmentOrder(kept=(KEYS[1], KEYS[0]))})
    assert len(service._pending) == num_calls  # neither for "b", which still has none
    service.publish_segments({"a": SegmentOrder(kept=(KEYS[1], KEYS[0])), "b": SegmentOrder(kept=(KEYS[2],))})
    assert len(service._pending) == num_calls + 1
    service.publish_segments({"a": SegmentOrder(kept=(KEYS[0],)), "b": SegmentOrder(kept=(KEYS[2],))})
    until(lambda: on_node(tmp_path, "a") == {KEYS[0]} and on_node(tmp_path, "b") == {KEYS[2]})
    remember(service, 1)
    service.publish_segments({"a": SegmentOrder(fresh=(KEYS[0],))})  # the same prompt with its newest responses
    until(lambda: service.report().num_built == 4)


def test_a_reader_that_moves_publishes_on_its_new_node_what_is_ordered_there(two_readers, tmp_path, log_lines):
    service = two_readers
    remember(service, 0)
    service.publish_segments({"a": SegmentOrder(fresh=tuple(KEYS[:8])), "b": SegmentOrder(fresh=tuple(KEYS[8:]))})
    until(lambda: on_node(tmp_path, "b") == set(KEYS[8:]))
    service.move_readers(["a", "c"])
    assert service.nodes == ("a", "c")
    service.add_segment("c", KEYS[8])
    until(lambda: on_node(tmp_path, "c") == {KEYS[8]})
    service.publish_segments({"a": SegmentOrder(kept=tuple(KEYS[:8])), "c": SegmentOrder(kept=tuple(KEYS[8:]))})
    until(lambda: on_node(tmp_path, "c") == set(KEYS[8:]))
    assert on_node(tmp_path, "b") == set(KEYS[8:])  # a lost node keeps what it had
    assert service.report().num_lost_calls == 0 and log_lines == []


def on_node(tmp_path: Path, node: str) -> set[int]:
    return {int(path.stem, 16) for path in (tmp_path / f"run-{node}").glob("*.segment")}
