"""Damaged bytes of saved tensors are found, wherever they lie."""

import errno
import io
from zipfile import ZipFile

import pytest
import torch

from megatron_rl.checkpoints.archives import check_archive
from megatron_rl.checkpoints.damage import DamagedCheckpointError

TENSOR = torch.arange(60, dtype=torch.bfloat16).view(5, 12)
BEFORE, AFTER = b"q" * 77, b"PK\x05\x06" * 30
DATA = "archive/data/0"


def saved(tensor):
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def is_refused(archive):
    """Whether an archive between others of the same file is refused."""
    stream = io.BytesIO(BEFORE + archive + AFTER)
    try:
        check_archive(stream, begin=len(BEFORE), size=len(archive))
    except DamagedCheckpointError:
        return True
    return False


def data_of(archive):
    """First byte of the tensor's elements and the one after the last."""
    entry = ZipFile(io.BytesIO(archive)).getinfo(DATA)
    lengths = archive[entry.header_offset + 26 : entry.header_offset + 30]
    begin = entry.header_offset + 30 + sum(int.from_bytes(each, "little") for each in (lengths[:2], lengths[2:]))
    return begin, begin + entry.file_size


@pytest.mark.parametrize("tensor", [TENSOR, torch.tensor(2.0), torch.empty(0)])
def test_what_torch_has_saved_is_accepted(tensor):
    assert not is_refused(saved(tensor))


def test_no_flipped_bit_changes_a_tensor_without_an_error():
    archive = saved(TENSOR)
    begin, end = data_of(archive)
    assert end - begin == TENSOR.nbytes
    harmless = 0
    for place in range(len(archive)):
        for bit in range(8) if begin <= place < end else [place % 8]:
            flipped = bytearray(archive)
            flipped[place] ^= 1 << bit
            if is_refused(flipped):
                continue
            assert not begin <= place < end, place
            try:
                loaded = torch.load(io.BytesIO(flipped), weights_only=True)
            except RuntimeError:  # torch finds this one
                continue
            assert loaded.dtype == TENSOR.dtype and torch.equal(loaded, TENSOR), place
            harmless += 1
    assert harmless > 100, "padding counts as damage"


def test_a_tensor_that_a_flip_has_made_a_folder_is_refused():
    """torch would return memory that holds anything."""
    archive = bytearray(saved(TENSOR))
    archive[archive.rindex(DATA.encode()) - 8] ^= 0x10
    assert is_refused(archive)


@pytest.mark.parametrize("kept", [0, 10, 100, 1000, -1])
def test_an_archive_whose_end_is_missing_is_refused(kept):
    archive = saved(TENSOR)
    stream = io.BytesIO(BEFORE + archive[:kept])
    with pytest.raises(DamagedCheckpointError, match=r"BadZipFile: File is not a zip file"):
        check_archive(stream, begin=len(BEFORE), size=len(archive))


class Failing(io.BytesIO):
    """A file one read of which fails."""

    left = 0

    def read(self, size=-1):
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().read(size)


def test_an_error_of_the_disk_is_no_damage_whenever_it_comes():
    archive, stream = saved(TENSOR), Failing(saved(TENSOR))
    check_archive(stream, begin=0, size=len(archive))
    num_reads = -stream.left
    assert num_reads > 10
    for read in range(1, num_reads + 1):
        stream.left = read
        with pytest.raises(OSError, match="Stale file handle"):
            check_archive(stream, begin=0, size=len(archive))
