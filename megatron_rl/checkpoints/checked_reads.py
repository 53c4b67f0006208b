"""Lets Megatron read the tensors of a checkpoint only after their bytes are checked.

Each rank checks the archives that it reads, one at a time, before torch reads them from the page cache. A rank that
finds damage raises an error, and torch hands it to all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron.core.dist_checkpointing.strategies import torch as strategy
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_rl.checkpoints.archives import check_archive
from megatron_rl.checkpoints.damage import DamagedCheckpointError


@contextmanager
def checked_reads() -> Iterator[None]:
    """Context in which a load of Megatron refuses damaged tensors, and names the first that a rank reads."""
    usual = strategy._get_filesystem_reader
    strategy._get_filesystem_reader = _reader
    try:
        yield
    finally:
        strategy._get_filesystem_reader = usual


def _reader(path: str | Path, cache_metadata: bool = False) -> "_CheckedReader":
    """Stands in for Megatron's `_get_filesystem_reader`."""
    del cache_metadata  # this one always does
    return _CheckedReader(path)


class _CheckedReader(CachedMetadataFileSystemReader):
    """Reads a checkpoint's tensors, each from an archive in one of its files."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._checked: set[tuple[str, int]] = set()
        """File and first byte: a rank under another partition may read several parts of one saved tensor."""

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        """The archive of a tensor, as torch is about to read it.

        Raises:
            DamagedCheckpointError: the archive is damaged.
            OSError: it cannot be read now.
        """
        place = (sinfo.relative_path, sinfo.offset)
        if place not in self._checked:
            try:
                check_archive(file, begin=sinfo.offset, size=sinfo.length)
            except DamagedCheckpointError as error:
                name = next(index.fqn for index, info in self.storage_data.items() if info is sinfo)
                message = f"{sinfo.relative_path} is damaged at the tensor {name} ({error})"
                raise DamagedCheckpointError(message) from error
            self._checked.add(place)
        archive: IO[bytes] = super()._slice_file(file, sinfo)
        return archive
