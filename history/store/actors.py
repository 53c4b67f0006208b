"""The actors of a run's history: shards own the responses, and a reader on each node of engines publishes segments.

A shard owns the prompts whose key modulo the number of shards is its number. Engines send finished responses to the
shards. A reader fetches the prompts that the engines of its node will sample, indexes them, and publishes one segment
per prompt in shared memory (`history.index.segment`); engines map the segments.
"""

import faulthandler
import os
import shutil
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ray

from history.index.segments_dir import claim, is_claimed, sweep_segments
from history.process_stat import start_ticks
from history.store.prompt_store import PromptStore, Return, StoreStats
from history.store.response_batch import ResponseBatch
from history.store.snapshot import SnapshotFile, SnapshotWriter
from history.types import ActorProcess, Epoch, PastResponse, SegmentOrder

FETCH_TIMEOUT_S = 60.0
_PROMPTS_PER_FETCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """Activity of a shard since its last report."""

    is_filled: bool
    """False after a restart, until the shard is filled again."""
    stats: StoreStats
    returns: tuple[Return, ...]
    process: ActorProcess | None = None
    """None outside a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSave:
    """Files written by a shard."""

    is_filled: bool
    files: tuple[SnapshotFile, ...]
    """Older before newer."""
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderReport:
    """Segments published by a reader."""

    is_filled: bool
    num_segments: int = 0
    num_bytes: int = 0
    """Shared memory of the segments."""
    num_left_out: int = 0
    """Segments that were left out or removed because there was no room, since the reader began."""
    num_built: int = 0
    """Segments that were built, since the reader began."""
    num_failures: int = 0
    """Fetches that failed, segments that could not be written and folders that were removed, since the reader began."""
    process: ActorProcess | None = None
    """None outside a run."""


def _this_process() -> ActorProcess:
    pid, node_id = os.getpid(), str(ray.get_runtime_context().get_node_id())
    return ActorProcess(node_id=node_id, pid=pid, start_ticks=start_ticks(pid), host=socket.gethostname())


def _write_stacks_on_signal() -> None:
    """By the signal of `rollout.processes`, which this package does not import."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


class Shard:
    """Owner of a part of the prompts; an actor (`HistoryShard`) in a run. All methods but `fetch` mutate.

    A thread of its own measures the reuse of returned prompts, because readers fetch right after the rewards arrive.
    """

    def __init__(self, number: int, num_shards: int, budget_bytes: int, kept_steps: int) -> None:
        from history.lengths.reuse import reusable_share

        _write_stacks_on_signal()
        self._number, self._num_shards = number, num_shards
        self._is_filled = False
        self._store = PromptStore(budget_bytes=budget_bytes, kept_steps=kept_steps, reuse_share=reusable_share)
        self._writer = SnapshotWriter(number, num_shards)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reuse")
        self._measuring: list[Future[None]] = []

    def mark_filled(self) -> None:
        """Mark the shard as filled: all its responses have been sent."""
        self._is_filled = True

    def note_epochs(self, epochs: Sequence[Epoch]) -> None:
        """Learn the length of the epochs of the run's data sets, of all shards' prompts."""
        self._store.note_epochs(
            {
                key: epoch.num_steps
                for epoch in epochs
                for key in epoch.prompt_keys[epoch.prompt_keys % self._num_shards == self._number].tolist()
            }
        )

    def append(self, batch: ResponseBatch) -> None:
        """Store finished responses."""
        for key, responses in batch.by_prompt().items():
            self._store.append(key, responses)
        self._measure()

    def note_rewards(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        """Store the rewards of a step's visits, by prompt key."""
        for key, group_rewards in rewards.items():
            self._store.note_rewards(key, step, group_rewards)
        self._measure()

    def fetch(self, prompt_keys: Sequence[int], known: Mapping[int, int]) -> tuple[dict[int, int], ResponseBatch]:
        """Return the stamps of the stored prompts, and the responses of prompts whose stamp is not the known one."""
        prompts = self._store.fetch(prompt_keys, known)
        stamps = {key: stamp for key, (stamp, _) in prompts.items()}
        return stamps, ResponseBatch.of((key, response) for key, (_, past) in prompts.items() for response in past)

    def restore(self, folder: str, another_run: bool, only: Collection[int] | None) -> int:
        """Add this shard's part of a snapshot; see `SnapshotWriter.restore`."""
        return self._writer.restore(self._store, Path(folder), another_run=another_run, only=only)

    def save(self, folder: str, previous: str) -> ShardSave:
        """Write the shard's files into `folder`; unchanged files are links to `previous`."""
        files = self._writer.save(self._store, Path(folder), Path(previous) if previous else None)
        return ShardSave(is_filled=self._is_filled, files=tuple(files), last_step=self._store.last_step)

    def report(self) -> ShardReport:
        """Return the counters, and the prompts whose return was measured since the last call."""
        self._check_measured()
        return ShardReport(
            is_filled=self._is_filled,
            stats=self._store.stats(),
            returns=tuple(self._store.drain_returns()),
            process=_this_process(),
        )

    def _measure(self) -> None:
        """Have the returned prompts measured; a measurement that has not begun yet will measure them, too."""
        newest = self._measuring[-1] if self._measuring else None
        if newest is None or newest.running() or newest.done():
            self._measuring.append(self._thread.submit(self._store.measure_returns))

    def _check_measured(self) -> None:
        """Raise the error of a measurement that has failed since the last report."""
        ended, running = list[Future[None]](), list[Future[None]]()
        for measured in self._measuring:
            (ended if measured.done() else running).append(measured)
        self._measuring = running
        for measured in ended:
            measured.result()


class Reader:
    """Publishes segments on its node; an actor (`HistoryReader`) in a run. All methods but `report` mutate.

    Invariant: the files of segments have at most `budget_bytes`, also while one replaces another. Engines keep removed
    files until they end the prompt; so a file is written only if as much is free, too.

    Cleaners of `/dev/shm` may remove the folder. The next order makes it again, with the segments of all its prompts.
    """

    def __init__(self, directory: str, budget_bytes: int) -> None:
        # imported late: the controller and engines import this module and must not import numba
        from history.index import segment

        _write_stacks_on_signal()
        self._segment = segment
        self._is_filled = False
        self._directory = Path(directory)
        self._budget_bytes = budget_bytes
        self._num_bytes = self._num_left_out = 0
        self._places: dict[int, int] = {}
        """Place of each prompt in the order in which they are needed."""
        self._stamps: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._num_built = self._num_failures = 0
        sweep_segments()
        self._lock = claim(self._directory)

    def mark_filled(self) -> None:
        """Mark the reader as filled: the last `publish` call has been sent."""
        self._is_filled = True

    def publish(self, order: SegmentOrder, shards: Sequence[ray.actor.ActorHandle]) -> None:
        """Publish the segments of an order, and remove all others.

        Where there is no room, segments of prompts that are needed later give way.

        Each call passes `shards`, because Ray cannot restart an actor whose constructor took handles.
        """
        self._make_folder_again()
        self._places = {key: place for place, key in enumerate((*order.kept, *order.fresh))}
        for key in self._stamps.keys() - order.keys:
            self._remove(key)
        self.add(order.kept, shards)
        self._publish(order.fresh, shards)

    def add(self, prompt_keys: Sequence[int], shards: Sequence[ray.actor.ActorHandle]) -> None:
        """Publish the segments of these prompts, too, as far as they are missing; they are needed at once."""
        for key in prompt_keys:
            self._places.setdefault(key, -1)
        if self._make_folder_again():
            prompt_keys = sorted(self._places, key=self._places.__getitem__)
        self._publish([key for key in prompt_keys if key not in self._stamps], shards)

    def report(self) -> ReaderReport:
        """Return the current counters."""
        return ReaderReport(
            is_filled=self._is_filled,
            num_segments=len(self._bytes),
            num_bytes=self._num_bytes,
            num_left_out=self._num_left_out,
            num_built=self._num_built,
            num_failures=self._num_failures,
            process=_this_process(),
        )

    def close(self) -> None:
        """Remove the folder; engines keep the segments that they have mapped."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _make_folder_again(self) -> bool:
        """Make the folder again if it was removed; returns whether it was, and all segments with it."""
        if is_claimed(self._directory, self._lock):
            return False
        lock = claim(self._directory)
        os.close(self._lock)
        self._lock, self._num_bytes, self._stamps, self._bytes = lock, 0, {}, {}
        self._num_failures += 1
        return True

    def _publish(self, prompt_keys: Sequence[int], shards: Sequence[ray.actor.ActorHandle]) -> None:
        """Publish the newest segments of these prompts, in this order."""
        for start in range(0, len(prompt_keys), _PROMPTS_PER_FETCH):
            self._publish_some(prompt_keys[start : start + _PROMPTS_PER_FETCH], shards)

    def _publish_some(self, prompt_keys: Sequence[int], shards: Sequence[ray.actor.ActorHandle]) -> None:
        fetches = []
        for number, shard in enumerate(shards):
            shard_keys = [key for key in prompt_keys if key % len(shards) == number]
            if shard_keys:
                known = {key: self._stamps[key] for key in shard_keys if key in self._stamps}
                fetches.append(shard.fetch.remote(shard_keys, known))
        for fetch in fetches:
            try:
                stamps, batch = ray.get(fetch, timeout=FETCH_TIMEOUT_S)
            except ray.exceptions.RayError:
                self._num_failures += 1
                continue
            for key, responses in batch.by_prompt().items():
                self._publish_one(key, stamps[key], responses)

    def _publish_one(self, key: int, stamp: int, responses: Sequence[PastResponse]) -> None:
        num_bytes = self._segment.file_bytes(responses)
        try:
            if not self._make_room(key, num_bytes):
                self._num_left_out += 1
                return
            segment = self._segment.build_segment(key, stamp, responses)
            self._num_built += 1
            self._segment.write_segment(self._directory, segment)
        except OSError:
            self._num_failures += 1
            return
        self._num_bytes += num_bytes - self._bytes.get(key, 0)
        self._stamps[key], self._bytes[key] = stamp, num_bytes

    def _make_room(self, key: int, num_bytes: int) -> bool:
        """Remove the prompt's older segment and those of prompts that are needed after it, if there is no room."""
        if self._has_room(num_bytes):
            return True
        if key in self._bytes:
            self._remove(key)
        later = [other for other in self._bytes if self._places[other] > self._places[key]]
        for other in sorted(later, key=self._places.__getitem__, reverse=True):
            if self._has_room(num_bytes):
                break
            self._remove(other)
            self._num_left_out += 1
        return self._has_room(num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        free_bytes = shutil.disk_usage(self._directory).free
        return num_bytes <= min(self._budget_bytes - self._num_bytes, free_bytes)

    def _remove(self, key: int) -> None:
        self._segment.segment_path(self._directory, key).unlink(missing_ok=True)
        self._num_bytes -= self._bytes.pop(key)
        del self._stamps[key]


HistoryShard = ray.remote(Shard)
HistoryReader = ray.remote(Reader)
