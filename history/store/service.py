"""The history of a run as the controller sees it: calls the actors and refills restarted ones.

The controller holds a `HistoryService`. It sends calls to the shards and readers (`history.store.actors`) and checks
their results once a step.

Ray restarts an actor that dies, under the same handle and empty. The next `report` detects the restart and logs it. It
refills a shard from the newest snapshot and repeats the last orders of all readers, or repeats that of a reader. Lost
calls are counted and cost drafts, never responses: sampling does not wait for the history.
"""

import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from history.ray_wait import wait_for_all
from history.store.actors import ReaderReport, ShardReport, ShardSave
from history.store.prompt_store import Return, StoreStats
from history.store.response_batch import ResponseBatch
from history.store.snapshot import MANIFEST, Manifest, check_snapshot, write_manifest
from history.types import ActorProcess, Epoch, SegmentOrder, folder_of_node

REPORT_TIMEOUT_S = 5.0
"""Longest wait of a step for an actor's report; afterwards the step uses the previous report."""

HANG_S = 120.0
"""An actor that was waited for so long, and has not answered, hangs; it is killed, and Ray restarts it."""

SAVE_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """State of the whole history."""

    stats: StoreStats
    num_segments: int
    segment_bytes: int
    """Bytes of the segments of all nodes."""
    num_left_out: int
    """Segments that were left out because a node had no room for them, since the run began."""
    num_built: int
    """Segments that the readers built, since they began."""
    num_lost_calls: int
    """Calls to shards and readers that failed, since the run began."""
    returns: tuple[Return, ...]
    """Prompts that returned since the last report, of all shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """What a service needs for losses."""

    log: Callable[[str], None]
    """Receives one line about every loss."""
    end_hung: Callable[[str, ActorProcess], None] | None = None
    """Kills the process of an actor that hangs, given the actor's name. None: Ray kills it."""


@dataclass(slots=True, kw_only=True)
class _Actor:
    """One actor and its last report."""

    name: str
    handle: ray.actor.ActorHandle
    node: str = ""
    """Ray's id of a reader's node."""
    last: ShardReport | ReaderReport | None = None
    silent_s: float = 0.0
    """For which reports have waited for it since its last answer. Between two reports nobody waits."""

    @property
    def named(self) -> str:
        """Its name and where it runs, for messages."""
        process = None if self.last is None else self.last.process
        if process is not None:
            return f"{self.name} (process {process.pid} on {process.host})"
        return f"{self.name} (on node {self.node})" if self.node else self.name


class HistoryService:
    """All shards and readers of a run.

    Every method returns at once, except `append_all`, `restore`, `report`, `save` and `close`.
    """

    def __init__(
        self,
        shards: Sequence[ray.actor.ActorHandle],
        nodes: Sequence[str],
        *,
        start_reader: Callable[[str], ray.actor.ActorHandle],
        directory: str,
        fingerprint: str,
        upkeep: Upkeep,
    ) -> None:
        """Start the readers, and watch them and the shards.

        Args:
            shards: in the order of their numbers.
            nodes: Ray's ids of the nodes with a reader.
            start_reader: starts a reader on a node, by Ray's id.
            directory: name of the folders in which readers publish, without their nodes.
            fingerprint: of tokenizer and vocabulary.
            upkeep: what is done about losses.
        """
        self.shards = tuple(shards)
        self.directory = directory
        self._start_reader = start_reader
        self._readers: dict[str, ray.actor.ActorHandle] = {}
        self._fingerprint = fingerprint
        self._upkeep = upkeep
        self._actors = [_Actor(name=f"history shard {number}", handle=shard) for number, shard in enumerate(shards)]
        self._pending = deque[ray.ObjectRef](shard.mark_filled.remote() for shard in shards)
        """Calls whose results are not checked yet. Other threads may add to it, so it stays the same object."""
        self._orders: dict[str, SegmentOrder] = {}
        """Newest order of each node with a reader."""
        self._fulfilled: dict[str, SegmentOrder | None] = {}
        """By node, the order that its reader has carried out without a failure, as its last report shows."""
        self._epochs: tuple[Epoch, ...] = ()
        self._newest = ""
        self._num_lost_calls = self._num_left_out = 0
        self._num_readers = 0
        """Readers that were ever started."""
        self._nodes: set[str] = set()
        """Nodes that ever had a reader."""
        self.move_readers(nodes)

    def note_epochs(self, epochs: Sequence[Epoch]) -> None:
        """Tell the shards how long the epochs of the run's data sets are; a restarted shard is told again."""
        self._epochs = tuple(epochs)
        self._pending += [shard.note_epochs.remote(self._epochs) for shard in self.shards]

    def append_all(self, batches: Iterable[ResponseBatch]) -> None:
        """Store responses that come from no engine of this run.

        A batch is sent when the shards have stored the one before. If they do not in time, the rest is left out.
        """
        sent: list[ray.ObjectRef] = []
        for batch in batches:
            if sent and wait_for_all(sent, timeout_s=HANG_S)[1]:
                self._record_loss(f"a history shard has stored nothing for {HANG_S:.0f} s; what follows is left out")
                return
            parts = zip(self.shards, batch.split(len(self.shards)), strict=True)
            sent = [shard.append.remote(part) for shard, part in parts if len(part)]
            self._pending += sent

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ray's ids of the nodes with a reader."""
        return tuple(self._readers)

    def publish_segments(self, orders: Mapping[str, SegmentOrder]) -> None:
        """Publish the segments of these orders, by node, and remove all others.

        A reader whose segments stay as they are gets no call, unless some of them may be missing.
        """
        for node, reader in self._readers.items():
            before, after = self._orders.get(node), orders.get(node, SegmentOrder())
            stays = before is not None and not after.fresh and frozenset(after.kept) == before.keys
            if stays and self._fulfilled.get(node) is before:
                continue
            self._orders[node] = after
            self._pending.append(reader.publish.remote(after, self.shards))

    def add_segment(self, node: str, prompt_key: int) -> None:
        """Publish a segment on a node with a reader, beside those of its order.

        May be called while another thread reports.
        """
        order = self._orders.get(node, SegmentOrder())
        self._orders[node] = replace(order, kept=(*order.kept, prompt_key))
        self._pending.append(self._readers[node].add.remote([prompt_key], self.shards))

    def move_readers(self, nodes: Sequence[str]) -> None:
        """Have a reader on each of these nodes (Ray's ids) and on no other; a new one awaits its order."""
        for node in self._readers.keys() - set(nodes):
            handle = self._readers.pop(node)
            self._orders.pop(node, None)
            self._fulfilled.pop(node, None)
            self._actors = [actor for actor in self._actors if actor.handle is not handle]
            ray.kill(handle, no_restart=True)
        for node in nodes:
            if node in self._readers:
                continue
            reader = self._readers[node] = self._start_reader(node)
            actor = _Actor(name=f"history reader {self._num_readers}", handle=reader, node=node)
            self._num_readers += 1
            self._nodes.add(node)
            self._actors.append(actor)
            self._pending.append(reader.mark_filled.remote())

    def note_rewards(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        """Send the rewards of a step's visits to the shards, by prompt key; NaN where there is none."""
        for number, shard in enumerate(self.shards):
            shard_rewards = {key: tuple(group) for key, group in rewards.items() if key % len(self.shards) == number}
            if shard_rewards:
                self._pending.append(shard.note_rewards.remote(step, shard_rewards))

    def restore(self, folder: Path) -> None:
        """Start from a snapshot of this run; restarted shards are refilled from it. Raises SnapshotError."""
        check_snapshot(folder, self._fingerprint)
        self._newest = str(folder)
        self._pending += [shard.restore.remote(self._newest, False, None) for shard in self.shards]

    def warm_start(self, folder: Path, only: Collection[int]) -> None:
        """Start from the part of another run's snapshot that holds these prompts. Raises SnapshotError."""
        check_snapshot(folder, self._fingerprint)
        self._pending += [shard.restore.remote(str(folder), True, set(only)) for shard in self.shards]

    def report(self) -> ServiceReport:
        """Return the current state, and refill the actors that were restarted since the last report."""
        self._count_lost_calls()
        orders = dict(self._orders)  # another thread may replace one after the reader was asked
        calls = {actor.handle.report.remote(): actor for actor in self._actors}
        wait_for_all(list(calls), timeout_s=REPORT_TIMEOUT_S)
        received = [report for ref, actor in calls.items() if (report := self._receive(ref, actor, orders)) is not None]
        if any(isinstance(report, ShardReport) and not report.is_filled for report in received):
            self._repeat_orders()
        shards = [actor.last for actor in self._actors if isinstance(actor.last, ShardReport)]
        readers = [actor.last for actor in self._actors if isinstance(actor.last, ReaderReport)]
        return ServiceReport(
            stats=sum((report.stats for report in shards), StoreStats()),
            num_segments=sum(report.num_segments for report in readers),
            segment_bytes=sum(report.num_bytes for report in readers),
            num_left_out=self._note_left_out(sum(report.num_left_out for report in readers)),
            num_built=sum(report.num_built for report in readers),
            num_lost_calls=self._num_lost_calls + sum(report.num_failures for report in readers),
            returns=tuple(
                returned for report in received if isinstance(report, ShardReport) for returned in report.returns
            ),
        )

    def save(self, folder: Path) -> None:
        """Create `folder` and write a snapshot into it. On a failure, log it and remove the folder.

        An actor that does not answer is waited for until it counts as hanging.
        """
        self.report()
        while any(actor.silent_s for actor in self._actors):
            self.report()
        folder.mkdir()
        saving = [shard.save.remote(str(folder), self._newest) for shard in self.shards]
        if wait_for_all(saving, timeout_s=SAVE_TIMEOUT_S)[1]:
            self._discard(folder, f"a shard has not written its files in {SAVE_TIMEOUT_S:.0f} s")
            return
        try:
            parts: list[ShardSave] = ray.get(saving)
        except ray.exceptions.RayError as error:
            self._discard(folder, _line(error))
            return
        if not all(part.is_filled for part in parts):
            self._discard(folder, "a shard was restarted and is not refilled yet")
            return
        manifest = Manifest(
            fingerprint=self._fingerprint,
            num_shards=len(self.shards),
            last_step=max(part.last_step for part in parts),
            files=tuple(file for part in parts for file in part.files),
        )
        write_manifest(folder, manifest)

    def saved(self, folder: Path) -> None:
        """Use `folder` as the newest snapshot, if the last save succeeded."""
        if (folder / MANIFEST).exists():
            self._newest = str(folder)

    def close(self) -> None:
        """Stop all actors and remove the segments."""
        closing = [reader.close.remote() for reader in self._readers.values()]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for actor in (*self._readers.values(), *self.shards):
            ray.kill(actor, no_restart=True)
        for node in self._nodes:  # those that share this host
            shutil.rmtree(folder_of_node(self.directory, node), ignore_errors=True)

    def _count_lost_calls(self) -> None:
        """Count the calls that failed since the last report."""
        pending = [self._pending.popleft() for _ in range(len(self._pending))]
        if not pending:
            return
        done, running = ray.wait(pending, num_returns=len(pending), timeout=0)
        self._pending.extend(running)
        faults = []
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                faults.append(_line(error))
        if faults:
            self._record_loss(f"{len(faults)} call(s) to the history were lost ({faults[0]})", count=len(faults))

    def _receive(
        self, ref: ray.ObjectRef, actor: _Actor, orders: Mapping[str, SegmentOrder]
    ) -> ShardReport | ReaderReport | None:
        """Return the report if it arrived in time; refill a restarted actor. `orders`: those before it was asked."""
        try:
            report: ShardReport | ReaderReport = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            self._note_silence(actor)
            return None
        except ray.exceptions.RayError as error:
            self._record_loss(f"{actor.name} does not answer ({_line(error)})")
            return None
        if isinstance(report, ReaderReport):
            num_failures = actor.last.num_failures if isinstance(actor.last, ReaderReport) else 0
            is_fulfilled = report.is_filled and report.num_failures <= num_failures
            self._fulfilled[actor.node] = orders.get(actor.node) if is_fulfilled else None
        actor.last, actor.silent_s = report, 0.0
        if not report.is_filled:
            self._record_loss(f"{actor.name} died and was restarted")
            self._refill(actor)
        return report

    def _repeat_orders(self) -> None:
        """Have the segments built that are missing because a shard was empty when they were ordered."""
        self._fulfilled.clear()
        for node, reader in self._readers.items():
            self._pending.append(reader.publish.remote(self._orders.get(node, SegmentOrder()), self.shards))

    def _note_left_out(self, num_left_out: int) -> int:
        """Log the first segments that were left out, and return their number."""
        if num_left_out and not self._num_left_out:
            self._upkeep.log(
                f"{num_left_out} segment(s) of the history have no room in /dev/shm and give no drafts; raise "
                "`history.shm_bytes`, or enlarge /dev/shm; metric history/left_out_segments counts further ones"
            )
        self._num_left_out = max(self._num_left_out, num_left_out)  # a restarted reader counts from 0
        return num_left_out

    def _note_silence(self, actor: _Actor) -> None:
        """An actor has not answered in time; one that hangs is killed, and the next report finds it restarted."""
        if not actor.silent_s:
            self._record_loss(f"{actor.named} does not answer")
        actor.silent_s += REPORT_TIMEOUT_S
        if actor.silent_s < HANG_S:
            return
        self._record_loss(f"{actor.named} has not answered for {HANG_S:.0f} s and is restarted")
        actor.silent_s = 0.0
        process = None if actor.last is None else actor.last.process
        if process is not None and self._upkeep.end_hung is not None:
            self._upkeep.end_hung(actor.name, process)
        else:
            ray.kill(actor.handle, no_restart=False)

    def _refill(self, actor: _Actor) -> None:
        if isinstance(actor.last, ReaderReport):
            order = self._orders.get(actor.node, SegmentOrder())
            self._pending.append(actor.handle.publish.remote(order, self.shards))
        else:
            self._pending.append(actor.handle.note_epochs.remote(self._epochs))
            if self._newest:
                self._pending.append(actor.handle.restore.remote(self._newest, False, None))
        self._pending.append(actor.handle.mark_filled.remote())

    def _discard(self, folder: Path, reason: str) -> None:
        """Remove an incomplete snapshot: the previous one is better. A late shard may still write into it."""
        shutil.rmtree(folder, ignore_errors=True)
        self._record_loss(f"the history could not be saved ({reason})")

    def _record_loss(self, loss: str, *, count: int = 1) -> None:
        self._num_lost_calls += count
        self._upkeep.log(f"{loss}; engines draft from the remaining history")


def _line(error: BaseException) -> str:
    """Return the last line of a remote method's error, or the type of another failure."""
    lines = str(error).strip().splitlines() if isinstance(error, ray.exceptions.RayTaskError) else []
    return lines[-1].strip() if lines else type(error).__name__
