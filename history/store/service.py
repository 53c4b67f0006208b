"""The history of a run as Ray actors: shards own the responses, and a reader on every node publishes segments.

A shard owns the prompts whose key modulo the number of shards is its number. Engines send finished responses to the
shards. The readers fetch the prompts of the next rollout, index them, and publish one segment per prompt in shared
memory (`history.index.segment`); engines map the segments. The controller holds a `HistoryService`. It sends calls to
the actors and checks their results once a step.

Ray restarts an actor that dies, under the same handle and empty. The next `report` detects the restart and logs it. It
refills a shard from the newest snapshot, or repeats the last call to a reader. Lost calls are counted and cost drafts,
never responses: sampling does not wait for the history.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from history.config import HistoryConfig
from history.index.segments_dir import claim, sweep_segments
from history.store.prompt_store import PromptStore, Return, StoreStats
from history.store.response_batch import ResponseBatch
from history.store.snapshot import Manifest, SnapshotFile, SnapshotWriter, check_snapshot, write_manifest

REPORT_TIMEOUT_S = 5.0
"""Longest wait of a step for an actor's report; afterwards the step uses the previous report."""

SAVE_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 5.0
FETCH_TIMEOUT_S = 60.0
_PROMPTS_PER_FETCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """Activity of a shard since its last report."""

    is_filled: bool
    """False after a restart, until the shard is filled again."""
    stats: StoreStats
    returns: tuple[Return, ...]


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
    num_failures: int = 0
    """Fetches that failed and segments that could not be written, since the reader began."""


class Shard:
    """Owner of a part of the prompts; an actor (`HistoryShard`) in a run. All methods but `fetch` mutate."""

    def __init__(self, number: int, num_shards: int, budget_bytes: int, kept_steps: int) -> None:
        from history.lengths.reuse import reusable_share

        self._is_filled = False
        self._store = PromptStore(budget_bytes=budget_bytes, kept_steps=kept_steps, reuse_share=reusable_share)
        self._writer = SnapshotWriter(number, num_shards)

    def mark_filled(self) -> None:
        """Mark the shard as filled: all its responses have been sent."""
        self._is_filled = True

    def append(self, batch: ResponseBatch) -> None:
        """Store finished responses."""
        for key, responses in batch.by_prompt().items():
            self._store.append(key, responses)

    def note_rewards(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        """Store the rewards of a step's groups, by prompt key."""
        for key, of_group in rewards.items():
            self._store.note_rewards(key, step, of_group)

    def fetch(self, prompt_keys: Sequence[int], known: Mapping[int, int]) -> tuple[dict[int, int], ResponseBatch]:
        """Return the stamps of the stored prompts, and the responses of prompts whose stamp is not the known one."""
        found = self._store.fetch(prompt_keys, known)
        stamps = {key: stamp for key, (stamp, _) in found.items()}
        return stamps, ResponseBatch.of((key, response) for key, (_, past) in found.items() for response in past)

    def restore(self, folder: str, another_run: bool, only: Collection[int] | None) -> int:
        """Add this shard's part of a snapshot; see `SnapshotWriter.restore`."""
        return self._writer.restore(self._store, Path(folder), another_run=another_run, only=only)

    def save(self, folder: str, previous: str) -> ShardSave:
        """Write the shard's files into `folder`; unchanged files are links to `previous`."""
        files = self._writer.save(self._store, Path(folder), Path(previous) if previous else None)
        return ShardSave(is_filled=self._is_filled, files=tuple(files), last_step=self._store.last_step)

    def report(self) -> ShardReport:
        """Return the counters, and the prompts that returned since the last call."""
        return ShardReport(
            is_filled=self._is_filled, stats=self._store.stats(), returns=tuple(self._store.drain_returns())
        )


class Reader:
    """Publishes segments on its node; an actor (`HistoryReader`) in a run. All methods but `report` mutate."""

    def __init__(self, directory: str) -> None:
        # imported late: the controller and engines import this module and must not import numba
        from history.index.segment import build_segment, segment_path, write_segment

        self._build, self._path, self._write = build_segment, segment_path, write_segment
        self._is_filled = False
        self._directory = Path(directory)
        self._stamps: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._num_failures = 0
        sweep_segments()
        self._lock = claim(self._directory)

    def mark_filled(self) -> None:
        """Mark the reader as filled: the last `publish` call has been sent."""
        self._is_filled = True

    def publish(self, prompt_keys: Sequence[int], shards: Sequence[ray.actor.ActorHandle]) -> None:
        """Publish the newest segments of these prompts, in this order, and remove all others.

        Each call passes `shards`, because Ray cannot restart an actor whose constructor took handles.
        """
        for key in self._stamps.keys() - set(prompt_keys):
            self._remove(key)
        for start in range(0, len(prompt_keys), _PROMPTS_PER_FETCH):
            self._publish(prompt_keys[start : start + _PROMPTS_PER_FETCH], shards)

    def report(self) -> ReaderReport:
        """Return the current counters."""
        return ReaderReport(
            is_filled=self._is_filled,
            num_segments=len(self._bytes),
            num_bytes=sum(self._bytes.values()),
            num_failures=self._num_failures,
        )

    def close(self) -> None:
        """Remove the folder; engines keep the segments that they have mapped."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _publish(self, prompt_keys: Sequence[int], shards: Sequence[ray.actor.ActorHandle]) -> None:
        asked = []
        for number, shard in enumerate(shards):
            own = [key for key in prompt_keys if key % len(shards) == number]
            if own:
                known = {key: self._stamps[key] for key in own if key in self._stamps}
                asked.append(shard.fetch.remote(own, known))
        for ref in asked:
            try:
                stamps, batch = ray.get(ref, timeout=FETCH_TIMEOUT_S)
            except ray.exceptions.RayError:
                self._num_failures += 1
                continue
            for key, responses in batch.by_prompt().items():
                segment = self._build(key, stamps[key], responses)
                try:
                    self._write(self._directory, segment)
                except OSError:
                    self._num_failures += 1
                    continue
                self._stamps[key] = stamps[key]
                self._bytes[key] = segment.num_bytes

    def _remove(self, key: int) -> None:
        self._path(self._directory, key).unlink(missing_ok=True)
        del self._stamps[key], self._bytes[key]


HistoryShard = ray.remote(Shard)
HistoryReader = ray.remote(Reader)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """State of the whole history."""

    stats: StoreStats
    num_segments: int
    segment_bytes: int
    """Bytes of the segments of all nodes."""
    num_lost_calls: int
    """Calls to shards and readers that failed, since the run began."""
    returns: tuple[Return, ...]
    """Prompts that returned since the last report, of all shards."""


@dataclass(slots=True, kw_only=True)
class _Actor:
    """One actor and its last report."""

    name: str
    handle: ray.actor.ActorHandle
    last: ShardReport | ReaderReport | None = None


class HistoryService:
    """All shards and readers of a run. Every method returns at once, except `restore`, `report`, `save` and `close`."""

    def __init__(
        self,
        shards: Sequence[ray.actor.ActorHandle],
        readers: Sequence[ray.actor.ActorHandle],
        *,
        directory: str,
        fingerprint: str,
        log: Callable[[str], None],
    ) -> None:
        """Watch running actors.

        Args:
            shards: in the order of their numbers.
            readers: one for each node.
            directory: folder in which the readers publish.
            fingerprint: of tokenizer and vocabulary.
            log: receives one line about every loss.
        """
        self.shards = tuple(shards)
        self.directory = directory
        self._readers = tuple(readers)
        self._fingerprint = fingerprint
        self._log = log
        self._actors = [
            *(_Actor(name=f"history shard {number}", handle=shard) for number, shard in enumerate(shards)),
            *(_Actor(name=f"history reader {number}", handle=reader) for number, reader in enumerate(readers)),
        ]
        self._pending: list[ray.ObjectRef] = [actor.handle.mark_filled.remote() for actor in self._actors]
        self._published_keys: list[int] = []
        self._newest = ""
        self._num_lost_calls = 0

    def append(self, batch: ResponseBatch) -> None:
        """Store responses that come from no engine of this run."""
        for shard, part in zip(self.shards, batch.split(len(self.shards)), strict=True):
            if len(part):
                self._pending.append(shard.append.remote(part))

    def publish_segments(self, prompt_keys: Sequence[int]) -> None:
        """Publish the segments of these prompts on every node, in this order, and remove all others."""
        self._published_keys = list(dict.fromkeys(prompt_keys))
        self._pending += [reader.publish.remote(self._published_keys, self.shards) for reader in self._readers]

    def note_rewards(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        """Send the rewards of a step's groups to the shards, by prompt key, [G] each."""
        for number, shard in enumerate(self.shards):
            own = {key: tuple(of_group) for key, of_group in rewards.items() if key % len(self.shards) == number}
            if own:
                self._pending.append(shard.note_rewards.remote(step, own))

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
        asked = {actor.handle.report.remote(): actor for actor in self._actors}
        ray.wait(list(asked), num_returns=len(asked), timeout=REPORT_TIMEOUT_S)
        news = [report for ref, actor in asked.items() if (report := self._receive(ref, actor)) is not None]
        shards = [actor.last for actor in self._actors if isinstance(actor.last, ShardReport)]
        readers = [actor.last for actor in self._actors if isinstance(actor.last, ReaderReport)]
        return ServiceReport(
            stats=sum((report.stats for report in shards), StoreStats()),
            num_segments=sum(report.num_segments for report in readers),
            segment_bytes=sum(report.num_bytes for report in readers),
            num_lost_calls=self._num_lost_calls + sum(report.num_failures for report in readers),
            returns=tuple(one for report in news if isinstance(report, ShardReport) for one in report.returns),
        )

    def save(self, folder: Path) -> None:
        """Create `folder` and write a snapshot into it. On a failure, log it and remove the folder."""
        self.report()
        folder.mkdir()
        saving = [shard.save.remote(str(folder), self._newest) for shard in self.shards]
        try:
            parts: list[ShardSave] = ray.get(saving, timeout=SAVE_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            self._not_saved(folder, _line(error))
            return
        if not all(part.is_filled for part in parts):
            self._not_saved(folder, "a shard was restarted and is not refilled yet")
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
        if folder.exists():
            self._newest = str(folder)

    def close(self) -> None:
        """Stop all actors and remove the segments."""
        closing = [reader.close.remote() for reader in self._readers]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for actor in (*self._readers, *self.shards):
            ray.kill(actor, no_restart=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _count_lost_calls(self) -> None:
        """Count the calls that failed since the last report."""
        if not self._pending:
            return
        done, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=0)
        faults = []
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                faults.append(_line(error))
        if faults:
            self._lost(f"{len(faults)} call(s) to the history were lost ({faults[0]})", count=len(faults))

    def _receive(self, ref: ray.ObjectRef, actor: _Actor) -> ShardReport | ReaderReport | None:
        """Return the report if it arrived in time; refill a restarted actor."""
        try:
            report: ShardReport | ReaderReport = ray.get(ref, timeout=0)
        except ray.exceptions.RayError as error:
            self._lost(f"{actor.name} does not answer ({_line(error)})")
            return None
        actor.last = report
        if not report.is_filled:
            self._lost(f"{actor.name} died and was restarted")
            self._refill(actor)
        return report

    def _refill(self, actor: _Actor) -> None:
        if isinstance(actor.last, ReaderReport):
            self._pending.append(actor.handle.publish.remote(self._published_keys, self.shards))
        elif self._newest:
            self._pending.append(actor.handle.restore.remote(self._newest, False, None))
        self._pending.append(actor.handle.mark_filled.remote())

    def _not_saved(self, folder: Path, why: str) -> None:
        """Remove an incomplete snapshot: the previous one is better."""
        shutil.rmtree(folder)
        self._lost(f"the history could not be saved ({why})")

    def _lost(self, loss: str, *, count: int = 1) -> None:
        self._num_lost_calls += count
        self._log(f"{loss}; engines draft from the remaining history")


def start_history(
    config: HistoryConfig,
    *,
    directory: str,
    fingerprint: str,
    environment: Mapping[str, str],
    log: Callable[[str], None],
) -> HistoryService:
    """Start `config.num_shards` shards and a reader on every node of the cluster.

    Args:
        config: number and budget of the shards.
        directory: folder in which readers publish (`history.index.segments_dir`).
        fingerprint: of the tokenizer and its vocabulary; snapshots with another fingerprint are refused.
        environment: variables of the actors' processes.
        log: receives one line about every loss.
    """
    # no logical CPUs: the actors compute in bursts while engines and trainers wait for a device
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "runtime_env": {"env_vars": dict(environment)}}
    budget_bytes = config.budget_bytes // config.num_shards
    shards = [
        HistoryShard.options(**options).remote(number, config.num_shards, budget_bytes, config.kept_steps)
        for number in range(config.num_shards)
    ]
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes() if node["Alive"]]
    readers = [HistoryReader.options(**options, scheduling_strategy=place).remote(directory) for place in places]
    return HistoryService(shards, readers, directory=directory, fingerprint=fingerprint, log=log)


def _line(error: BaseException) -> str:
    """Return the last line of a remote method's error, or the type of another failure."""
    lines = str(error).strip().splitlines() if isinstance(error, ray.exceptions.RayTaskError) else []
    return lines[-1].strip() if lines else type(error).__name__
