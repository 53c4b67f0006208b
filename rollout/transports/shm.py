"""Staged transport on one node: each trainer rank writes one file in `/dev/shm`, engines map it.

A file is written under a temporary name and renamed when it is complete, so a reader sees all of a
rank's publish or none of it. Names carry run id and process id; `sweep` removes what a killed run
left behind. A segment may be unlinked while engines still have it mapped.

Invariants: bucket offsets are a function of the sizes alone (`bucket_offsets`), so nothing but the
manifest describes a segment; memory is reserved before the first byte is written (a full `/dev/shm`
is an error here, not a SIGBUS later).
"""

import errno
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout.types import WeightVersion
from rollout.wire import PIECE_ALIGNMENT, Bucket, WeightManifest, seal, verify

SHM = Path("/dev/shm")

_NAME = re.compile(r"\.?mrl-(?P<run_id>.+)-(?P<pid>\d+)-w-?\d+-r\d+(\.part)?")


def segment_path(*, run_id: str, pid: int, weight_version: WeightVersion, rank: int) -> Path:
    """Path of the finished segment of one trainer rank."""
    return SHM / f"mrl-{run_id}-{pid}-w{weight_version}-r{rank}"


def bucket_offsets(buckets: Sequence[Bucket]) -> tuple[dict[int, int], int]:
    """Where each bucket of one rank starts in its segment, by bucket index, and the segment's size in bytes."""
    offsets: dict[int, int] = {}
    end = 0
    for bucket in buckets:
        offsets[bucket.index] = end
        end += -(-bucket.num_bytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    return offsets, end


class ShmSender:
    """A trainer rank's writer; satisfies `rollout.transports.base.Sender`."""

    def __init__(self, *, run_id: str, rank: int) -> None:
        self._run_id = run_id
        self._rank = rank
        self._path: Path | None = None
        self._part: Path | None = None
        self._map: mmap.mmap | None = None
        self._buckets: dict[int, Bucket] = {}
        self._offsets: dict[int, int] = {}
        self._version = WeightVersion(-1)

    def open(self, weight_version: WeightVersion, buckets: Sequence[Bucket]) -> None:
        """Reserve the segment of one publish.

        Raises:
            RuntimeError: `/dev/shm` has no room for it.
        """
        self.abandon()
        self._version = weight_version
        self._buckets = {bucket.index: bucket for bucket in buckets}
        self._offsets, size = bucket_offsets(buckets)
        self._path = segment_path(run_id=self._run_id, pid=os.getpid(), weight_version=weight_version, rank=self._rank)
        self._part = self._path.with_name(f".{self._path.name}.part")
        self._map = _reserve(self._part, max(size, 1))

    def buffer(self, index: int) -> memoryview:
        """Writable bytes of bucket `index`, trailer included."""
        assert self._map is not None, "open() comes first"
        start = self._offsets[index]
        return memoryview(self._map)[start : start + self._buckets[index].num_bytes]

    def commit(self, index: int) -> None:
        """Write the trailer of a filled bucket."""
        seal(self.buffer(index), self._version)

    def finish(self) -> str:
        """Make the segment visible and return its path."""
        assert self._part is not None and self._path is not None
        self._part.rename(self._path)
        self._part = None
        self._map = None
        return str(self._path)

    @property
    def sent_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.num_bytes for bucket in self._buckets.values())

    def abandon(self) -> None:
        """Remove the segment, finished or not. Engines that have it mapped keep their view."""
        for path in (self._part, self._path):
            if path is not None:
                path.unlink(missing_ok=True)
        self._path = self._part = self._map = None


def _reserve(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        raise RuntimeError(
            f"{SHM} has no room for a segment of {size} bytes: enlarge it, or set publish.transport=gloo"
        ) from error
    finally:
        os.close(descriptor)


class ShmInbox:
    """All segments of one publish, mapped privately; satisfies `rollout.transports.base.Inbox`."""

    def __init__(self, manifest: WeightManifest, segments: Mapping[int, str]) -> None:
        """Map the segment of every trainer rank that the manifest names; `segments` maps rank to path.

        Raises:
            RuntimeError: a rank's segment is missing or has another size than the manifest says.
        """
        self._version = manifest.weight_version
        self._places: dict[int, memoryview] = {}
        for rank in sorted({bucket.source_rank for bucket in manifest.buckets}):
            own = [bucket for bucket in manifest.buckets if bucket.source_rank == rank]
            offsets, size = bucket_offsets(own)
            view = _map_segment(rank, segments.get(rank), size, manifest.weight_version)
            for bucket in own:
                start = offsets[bucket.index]
                self._places[bucket.index] = view[start : start + bucket.num_bytes]

    def take(self, bucket: Bucket) -> memoryview:
        """Return the verified bytes of a bucket."""
        view = self._places[bucket.index]
        verify(view, self._version, index=bucket.index)
        return view


def _map_segment(rank: int, path: str | None, size: int, version: WeightVersion) -> memoryview:
    if path is None:
        raise RuntimeError(f"no segment of trainer rank {rank} came with weight version {version}")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise RuntimeError(f"trainer rank {rank} has no segment of weight version {version} at {path}") from error
    try:
        found = os.fstat(descriptor).st_size
        if found != max(size, 1):
            raise RuntimeError(f"segment of trainer rank {rank} at {path} has {found} bytes, the manifest says {size}")
        # private: torch wants writable memory, and nobody can write through to the other engines
        return memoryview(mmap.mmap(descriptor, found, access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)


def verify_segments(manifest: WeightManifest, segments: Mapping[int, str]) -> None:
    """Check every bucket of a staged publish against its trailer.

    Raises:
        RuntimeError: naming the first missing segment or the first corrupt bucket.
    """
    inbox = ShmInbox(manifest, segments)
    for bucket in manifest.buckets:
        inbox.take(bucket)


def sweep(run_id: str | None = None) -> list[Path]:
    """Remove segments of dead processes and, if `run_id` is given, all of that run; returns what was removed."""
    removed: list[Path] = []
    for path in SHM.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        if match["run_id"] == run_id or not Path(f"/proc/{match['pid']}").exists():
            path.unlink(missing_ok=True)
            removed.append(path)
    return sorted(removed)
