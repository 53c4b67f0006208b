"""Writes one rank's part of a checkpoint: threads write files from copies in host memory, while the rank trains.

Megatron plans which rank writes which tensor, and collects the results. Between the two it would fork writers; forks
of a process with CUDA, NCCL and open sockets are fragile, so threads write here. They end with the process.

A save has three parts: `begin` plans and copies, threads write, `finish` collects. `begin` and `finish` are
collectives.

Invariants: after `begin` with `background`, files do not depend on live tensors. Files are synchronised to disk before
`finish` returns. Only `finish` makes a checkpoint that can be loaded: it writes `.metadata` and `metadata.json`.
"""

import os
import queue
import time
from collections.abc import Sequence, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from history.own_files import opener
from megatron_rl.checkpoints.boxes import METADATA

FILES_PER_RANK = 2
"""Written at the same time, each by a thread."""
SYNC_BYTES = 256 << 20
"""Bytes of a file after which it is synchronised while it is written, at the end of a tensor. So its bytes move at the
disk's pace, by which others see that the rank does not hang (`megatron_rl.trainer.rank_watch`)."""
ALIGNMENT = 64
"""Bytes; copies start at its multiples."""

Tensors: TypeAlias = list[tuple[WriteItem, torch.Tensor]]
PlannedFile: TypeAlias = tuple[str, str, tuple[list[tuple[WriteItem, BytesIO]], Tensors]]
"""Path, name in the metadata, and content of a file, as Megatron plans it."""


@dataclass(slots=True, kw_only=True)
class _Save:
    """A save between `begin` and `finish`."""

    request: AsyncRequest
    started: float
    writing: list[Future[list[WriteResult]]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    """When each thread that has ended did so."""

    def write(self, file: PlannedFile, threads: Executor) -> None:
        """Let one of the threads write a file."""
        writing = threads.submit(_write, file)
        self.writing.append(writing)
        writing.add_done_callback(lambda _: self.ended.append(time.perf_counter()))


class CheckpointWriter:
    """The saves of one rank, one at a time."""

    def __init__(self, threads: Executor | None = None) -> None:
        """`threads` write the files; None for threads of its own."""
        self._threads = threads or ThreadPoolExecutor(FILES_PER_RANK, thread_name_prefix="checkpoint")
        self._copies = HostBuffer()
        self._save: _Save | None = None
        # a rank's tensors are the same in every save, so plans are made once
        self._strategy = FullyParallelSaveStrategyWrapper(
            TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=FILES_PER_RANK, cached_metadata=True),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            do_cache_distribution=True,
        )
        if filesystem_async._results_queue is None:
            # Megatron would start a process that holds the queue, which takes seconds
            filesystem_async._results_queue = queue.Queue()

    def begin(self, state: dict[str, object], path: Path, *, background: bool) -> None:
        """Start writing a sharded state below the existing directory `path`; a collective.

        Args:
            state: sharded state of Megatron.
            path: empty directory.
            background: write from copies. Without it the caller must not change the state before `finish`.
        """
        assert self._save is None, "`finish` comes before the next `begin`"
        started, live = time.perf_counter(), _storages(state)
        request = dist_checkpointing.save(
            state,
            str(path),
            sharded_strategy=self._strategy,
            validate_access_integrity=False,  # the strategy does so in the first save
            async_sharded_save=True,
            content_metadata=METADATA,
        )
        files: list[PlannedFile] = request.async_fn_args[1] if request.async_fn else []
        if background:
            self._copy([tensors for _, _, (_, tensors) in files], live)
        torch.distributed.barrier()  # Megatron's rank 0 warns if files exist while it still plans
        self._save = _Save(request=request, started=started)
        for file in files:
            self._save.write(file, self._threads)

    def seconds(self) -> float | None:
        """From `begin` to the end of this rank's threads; None while one still writes. Errors are left to `finish`."""
        assert self._save is not None, "there is no save"
        save = self._save
        if len(save.ended) < len(save.writing):
            return None
        return max(save.ended, default=save.started) - save.started

    def finish(self) -> float:
        """Wait for this rank's files, then complete the checkpoint; a collective. Returns `seconds()`.

        Raises:
            OSError: a file could not be written.
        """
        assert self._save is not None, "`begin` comes before `finish`"
        save = self._save
        results = {number: writing.result() for number, writing in enumerate(save.writing)}
        if results:
            save.request.async_fn_args[2].put(results)
        for finalize in save.request.finalize_fns:
            finalize()
        self._save = None
        return max(save.ended, default=save.started) - save.started

    def _copy(self, planned: Sequence[Tensors], live: Set[int]) -> None:
        """Replace tensors by copies in host memory.

        On a CPU Megatron has copied some already: those that are a part of a larger storage. `live` are the others.
        """
        places = [
            (tensors, number)
            for tensors in planned
            for number, (_, tensor) in enumerate(tensors)
            if tensor.is_cuda or tensor.untyped_storage().data_ptr() in live
        ]
        self._copies.reserve(sum(_aligned(tensors[number][1].nbytes) for tensors, number in places))
        for tensors, number in places:
            item, tensor = tensors[number]
            tensors[number] = (item, self._copies.copy(tensor))
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class HostBuffer:
    """Host memory for copies, kept from save to save: fresh memory takes as long as copying, pinned memory longer.

    Where there are devices, it is pinned. torch's own pinned memory would round the size up to a power of two.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)
        self._used = 0

    def reserve(self, num_bytes: int) -> None:
        """Make room for copies of `num_bytes`; earlier copies become invalid."""
        self._used = 0
        if num_bytes <= len(self._memory):
            return
        runtime = torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
        if runtime is not None and len(self._memory):
            runtime.cudaHostUnregister(self._memory.ctypes.data)
        self._memory = np.empty(num_bytes, dtype=np.uint8)
        if runtime is None:
            return
        if code := int(runtime.cudaHostRegister(self._memory.ctypes.data, num_bytes, 0)):
            raise RuntimeError(
                f"{num_bytes} bytes of host memory for copies of a checkpoint cannot be pinned (CUDA error {code}); "
                "`checkpoint.background=false` needs no copies"
            )

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; the copy of a device's tensor is complete after the next synchronisation.

        Its storage is no larger than the tensor, so that only the tensor is written.
        """
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        host = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += _aligned(tensor.nbytes)
        return host.view(tensor.shape).copy_(tensor, non_blocking=True)


def _storages(state: dict[str, object]) -> Set[int]:
    """Addresses of the storages of a sharded state."""
    tensors = (getattr(entry, "data", None) for entry in nested_values(state))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _write(file: PlannedFile) -> list[WriteResult]:
    """Write a file and synchronise it, part by part. Without copies, one tensor at a time is in host memory."""
    path, name, (objects, tensors) = file
    entries: list[tuple[WriteItem, BytesIO | torch.Tensor]] = [*objects, *tensors]
    results, transforms, synced = [], _StorageWriterTransforms(), 0
    try:
        with open(path, "wb", opener=opener) as stream:
            for item, data in entries:
                content = data.cpu() if isinstance(data, torch.Tensor) else data
                results.append(_write_item(transforms, stream, content, item, name, SerializationFormat.TORCH_SAVE))
                if stream.tell() - synced >= SYNC_BYTES:
                    stream.flush()
                    os.fdatasync(stream.fileno())
                    synced = stream.tell()
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} while a checkpoint was written", path) from error
    return results
