"""Files in `/dev/shm`: each holds the buckets of one trainer rank for the engines of its node. Pure: no torch.

A file is written under a temporary name and renamed when it is complete, so a reader sees the complete file or none.
A file may be unlinked while engines still have it mapped.

The process that owns a file holds a lock of the kernel on it (`flock`) as long as the process lives. `sweep` removes
files that nobody holds. So containers that share `/dev/shm` but not process ids leave each other's files alone.

Files of other users and links are neither removed nor mapped.

Invariants: bucket offsets depend on the bucket sizes alone (`bucket_offsets`), so the manifest describes a segment
completely. A full `/dev/shm` raises an error when a segment is created or written, never SIGBUS later: mapped memory is
reserved first, everything else is written.
"""

import errno
import fcntl
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

from history.own_files import open_own
from rollout.types import WeightVersion
from rollout.weights.manifest import PIECE_ALIGNMENT, Bucket

SHM = Path("/dev/shm")

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_NAME = re.compile(r"\.?mrl-(?P<run_id>.+)-(?P<pid>\d+)-w-?\d+-r\d+(\.part)?")


def segment_path(*, run_id: str, pid: int, weight_version: WeightVersion, rank: int) -> Path:
    """Path of the finished segment of one trainer rank."""
    return SHM / f"mrl-{run_id}-{pid}-w{weight_version}-r{rank}"


def bucket_offsets(buckets: Sequence[Bucket]) -> tuple[dict[int, int], int]:
    """First byte of each bucket of one rank in its segment, by bucket index, and the segment's size in bytes."""
    offsets: dict[int, int] = {}
    end = 0
    for bucket in buckets:
        offsets[bucket.index] = end
        end += -(-bucket.num_bytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    return offsets, end


class SegmentFile:
    """The segment of one publish of a trainer rank, while it is written and read.

    `write` fills it, or `reserve` maps it. Mapping is slower: the kernel clears every page and faults them in singly.
    """

    def __init__(self, *, run_id: str, rank: int) -> None:
        self._run_id = run_id
        self._rank = rank
        self._path: Path | None = None
        self._temporary: Path | None = None
        self._descriptor: int | None = None
        self.written_bytes = 0
        """Bytes that `write` has written since `begin`."""

    def begin(self, weight_version: WeightVersion, size: int) -> None:
        """Create a segment of `size` bytes; an earlier segment is removed.

        Raises:
            RuntimeError: `/dev/shm` has no room for it.
        """
        path = self._named(weight_version)
        free = os.statvfs(SHM)
        if free.f_bavail * free.f_frsize < size:
            raise _no_room(size)
        self._descriptor = _create(path)
        self.written_bytes = 0
        os.ftruncate(self._descriptor, max(size, 1))

    def write(self, content: memoryview, offset: int) -> None:
        """Write bytes into the segment that `begin` created.

        Raises:
            RuntimeError: `/dev/shm` has no room for them.
        """
        assert self._descriptor is not None, "begin() comes first"
        while content:
            try:
                written = os.pwrite(self._descriptor, content, offset)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise _no_room(len(content)) from error
            content, offset = content[written:], offset + written
            self.written_bytes += written

    def reserve(self, weight_version: WeightVersion, size: int) -> mmap.mmap:
        """Writable memory of `size` bytes; an earlier segment is removed.

        Raises:
            RuntimeError: `/dev/shm` has no room for it.
        """
        path = self._named(weight_version)
        self._descriptor = _create(path)
        return _reserve(path, self._descriptor, max(size, 1))

    def _named(self, weight_version: WeightVersion) -> Path:
        self.remove()
        pid = os.getpid()
        self._path = segment_path(run_id=self._run_id, pid=pid, weight_version=weight_version, rank=self._rank)
        self._temporary = self._path.with_name(f".{self._path.name}.part")
        return self._temporary

    def show(self) -> str:
        """Make the segment visible and return its path."""
        assert self._temporary is not None and self._path is not None, "begin() or reserve() comes first"
        self._temporary.rename(self._path)
        self._temporary = None
        return str(self._path)

    def remove(self) -> None:
        """Remove the segment, finished or not. Engines that have it mapped keep their view."""
        for path in (self._temporary, self._path):
            if path is not None:
                path.unlink(missing_ok=True)
        self._path = self._temporary = None
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def _create(path: Path) -> int:
    """Descriptor of a new file, with its lock. Whoever sweeps between the two steps has removed it: try again."""
    while True:
        descriptor = os.open(path, _FLAGS, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _reserve(path: Path, descriptor: int, size: int) -> mmap.mmap:
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        raise _no_room(size) from error


def _no_room(size: int) -> RuntimeError:
    return RuntimeError(f"{SHM} has no room for {size} bytes of a segment: enlarge it, or set publish.transport=gloo")


def map_segment(rank: int, path: str | None, size: int, version: WeightVersion) -> mmap.mmap:
    """Map the segment of `size` bytes of trainer rank `rank`.

    Raises:
        RuntimeError: the segment is missing, has another size, or is not a file of this user.
    """
    if path is None:
        raise RuntimeError(f"weight version {version} was announced without a segment of trainer rank {rank}")
    try:
        descriptor = open_own(Path(path))
    except FileNotFoundError as error:
        raise RuntimeError(f"trainer rank {rank} has no segment of weight version {version} at {path}") from error
    if descriptor is None:
        raise RuntimeError(f"segment of trainer rank {rank} at {path} is a link, or belongs to another user")
    try:
        length = os.fstat(descriptor).st_size
        if length != max(size, 1):
            raise RuntimeError(f"segment of trainer rank {rank} at {path} has {length} bytes, the manifest says {size}")
        # a private mapping: torch needs writable memory, and writes must not reach other engines
        return mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def drop_pages(segment: mmap.mmap, start: int, size: int) -> None:
    """Drop the pages that lie completely in these bytes of a mapped segment; the file keeps their contents."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        segment.madvise(mmap.MADV_DONTNEED, first, end - first)


def sweep(run_id: str | None = None) -> list[Path]:
    """Remove this user's segments that no process holds and, if `run_id` is given, all segments of that run.

    Returns the removed paths.
    """
    removed: list[Path] = []
    for path in SHM.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and _remove_own(path, also_held=match["run_id"] == run_id):
            removed.append(path)
    return sorted(removed)


def _remove_own(path: Path, *, also_held: bool) -> bool:
    """Remove a file of this user; one that a process holds only if `also_held`. Returns whether it was removed."""
    try:
        descriptor = open_own(path)
    except FileNotFoundError:
        return False
    if descriptor is None:
        return False
    try:
        if not also_held:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:  # another sweep was faster; the path may be its owner's next file
                return False
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
