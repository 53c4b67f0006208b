"""Staged transport on one node: each trainer rank writes one file in `/dev/shm`, and engines map it.

`rollout.transports.shm_files` describes the file.
"""

import mmap
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rollout.transports.checksum import seal, verify
from rollout.transports.shm_files import SegmentFile, bucket_offsets, drop_pages, map_segment
from rollout.types import WeightVersion
from rollout.weights.manifest import Bucket, WeightManifest


class ShmSender:
    """A trainer rank's writer; satisfies `rollout.transports.base.Sender`."""

    def __init__(self, *, run_id: str, rank: int) -> None:
        self._run_id = run_id
        self._file = SegmentFile(run_id=run_id, rank=rank)
        self._payload = torch.empty(0, dtype=torch.uint8)
        """Buffer of the largest bucket's size, reused for every bucket and publish."""
        self._is_open = False
        self._buckets: dict[int, Bucket] = {}
        self._offsets: dict[int, int] = {}
        self._version = WeightVersion(-1)

    def open(self, weight_version: WeightVersion, buckets: Sequence[Bucket]) -> None:
        """Reserve the segment of one publish; a rank without buckets has none.

        Raises:
            RuntimeError: `/dev/shm` has no room for it.
        """
        self.abandon()
        self._version = weight_version
        self._buckets = {bucket.index: bucket for bucket in buckets}
        self._offsets, size = bucket_offsets(buckets)
        if buckets:
            self._file.begin(weight_version, size)
            self._is_open = True
            largest = max(bucket.num_bytes for bucket in buckets)
            if self._payload.numel() < largest:
                self._payload = torch.empty(largest, dtype=torch.uint8)

    def buffer(self, index: int) -> torch.Tensor:
        """Writable bytes of bucket `index`, trailer included."""
        assert self._is_open, "open() comes first"
        return self._payload[: self._buckets[index].num_bytes]

    def commit(self, index: int) -> None:
        """Write the trailer of a filled bucket, and the bucket into the segment.

        Raises:
            RuntimeError: `/dev/shm` has no room for it any more.
        """
        bucket = self.buffer(index)
        seal(bucket, self._version, run_id=self._run_id, index=index)
        self._file.write(bucket.numpy().data, self._offsets[index])

    def finish(self) -> str:
        """Make the segment visible and return its path."""
        if not self._is_open:
            return ""
        self._is_open = False
        return self._file.show()

    @property
    def sent_bytes(self) -> int:
        """Bytes written to the segment."""
        return self._file.written_bytes

    @property
    def fault(self) -> str:
        """Empty: engines fetch what is shown, and report their own failures."""
        return ""

    def abandon(self) -> None:
        """Remove the segment, finished or not. Engines that have it mapped keep their view."""
        self._is_open = False
        self._file.remove()


class ShmInbox:
    """All segments of one publish, mapped privately; satisfies `rollout.transports.base.AwaitedInbox`.

    A thread verifies every bucket that the engine rank requires, while the engine still decodes and other ranks verify
    their own buckets. A bucket that was taken and released no longer occupies memory of this process.
    """

    def __init__(self, manifest: WeightManifest, segments: Mapping[int, str], *, engine_rank: int) -> None:
        """Map the segment of every trainer rank that the manifest names; `segments` maps rank to path.

        Raises:
            RuntimeError: a rank's segment is missing or has another size than the manifest says.
        """
        self._run_id, self._version = manifest.run_id, manifest.weight_version
        self.received_bytes = 0
        self._places: dict[int, tuple[mmap.mmap, int]] = {}
        """By bucket: its segment, and its first byte in the segment."""
        for rank in sorted({bucket.source_rank for bucket in manifest.buckets}):
            sent = [bucket for bucket in manifest.buckets if bucket.source_rank == rank]
            offsets, size = bucket_offsets(sent)
            segment = map_segment(rank, segments.get(rank), size, manifest.weight_version)
            self._places |= {index: (segment, start) for index, start in offsets.items()}
        verifier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verify")
        required = [bucket for bucket in manifest.buckets if bucket.required_by(engine_rank)]
        self._verified = verifier.submit(self._verify, required)
        verifier.shutdown(wait=False)

    def _verify(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            verify(self._bytes(bucket), self._version, run_id=self._run_id, index=bucket.index)

    def _bytes(self, bucket: Bucket) -> torch.Tensor:
        segment, start = self._places[bucket.index]
        return torch.frombuffer(segment, dtype=torch.uint8, offset=start, count=bucket.num_bytes)

    def arrived(self) -> bool:
        """Whether all buckets that the rank requires are verified.

        Raises:
            RuntimeError: naming the first corrupt bucket.
        """
        is_done = self._verified.done()
        if is_done:
            self._verified.result()
        return is_done

    def take(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of a bucket; waits until all required buckets are verified."""
        self._verified.result()
        payload = self._bytes(bucket)
        self.received_bytes += payload.numel()
        # views may outlive this tensor (in inference mode) and stay valid: dropped pages are read from the file again
        weakref.finalize(payload, drop_pages, *self._places[bucket.index], bucket.num_bytes)
        return payload
