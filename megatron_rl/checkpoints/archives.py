"""Checks the bytes of a checkpoint's tensors by the sums that torch has stored with them, and that it never looks at.

`torch.save` writes a ZIP archive. A file of tensors is a row of such archives, and each entry of an archive has a
CRC-32, in files of all versions. Only entries reach a tensor: a flip in the padding between them does no harm, and may
go unnoticed.
"""

import errno
import os
from typing import IO, cast
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from megatron_rl.checkpoints.damage import DamagedCheckpointError

_IS_FOLDER = 0x10
"""Attribute of a folder. torch takes such an entry for empty, and leaves the tensor's memory as it was."""


def check_archive(stream: IO[bytes], *, begin: int, size: int) -> None:
    """Read the archive of `size` bytes that starts at byte `begin` of a file.

    Raises:
        DamagedCheckpointError: the bytes of an entry are not those that were saved, or the archive has no form.
        OSError: the file cannot be read now.
    """
    part = _Part(stream, begin, size)
    try:
        with ZipFile(cast(IO[bytes], part)) as archive:
            strange = (entry.filename for entry in archive.infolist() if not _is_of_torch(entry))
            damaged = next(strange, None) or archive.testzip()
    except (BadZipFile, EOFError, OSError, RuntimeError, ValueError) as error:
        if part.failure is not None:  # which `zipfile` may have taken for damage
            raise part.failure from None
        raise DamagedCheckpointError(f"{type(error).__name__}: {error}") from error
    if damaged is not None:
        raise DamagedCheckpointError(f"the bytes of its entry {damaged} are not those that were saved")


def _is_of_torch(entry: ZipInfo) -> bool:
    return entry.compress_type == ZIP_STORED and not entry.external_attr & _IS_FOLDER


class _Part:
    """A range of a file's bytes, as a file to be read. torch's own seeks to a wrong place from the end."""

    def __init__(self, stream: IO[bytes], begin: int, size: int) -> None:
        self._stream = stream
        self._begin = begin
        self._size = size
        self._at = 0
        self.failure: OSError | None = None
        """Of the file."""

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "no bytes lie before an archive")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        try:
            self._stream.seek(self._begin + self._at)
            found = self._stream.read(min(size, left) if size >= 0 else left)
        except OSError as error:
            self.failure = error
            raise
        self._at += len(found)
        return found
