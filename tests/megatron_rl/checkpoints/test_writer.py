"""Files of a checkpoint reach the disk while they are written."""

import os

import torch


def test_a_file_is_synchronised_part_by_part_and_at_its_end(tmp_path, monkeypatch):
    """Otherwise no byte moves in a flush of the whole file, and a healthy rank looks as if it hung."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    from megatron_rl.checkpoints import writer

    sizes: list[int] = []
    monkeypatch.setattr(writer, "SYNC_BYTES", 10_000)
    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, name, lambda file: sizes.append(os.fstat(file).st_size))
    names = [f"tensor {number}" for number in range(5)]
    tensors = [(WriteItem(index=MetadataIndex(n), type=WriteItemType.TENSOR), torch.zeros(1500)) for n in names]
    results = writer._write((str(tmp_path / "file"), "file", ([], tensors)))
    assert [result.index.fqn for result in results] == names
    ends = [result.storage_data.offset + result.storage_data.length for result in results]
    assert sizes == [ends[1], ends[3], ends[4]]
    assert (tmp_path / "file").stat().st_size == ends[4]
