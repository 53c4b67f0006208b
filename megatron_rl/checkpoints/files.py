"""Checks the files of a checkpoint before Megatron reads them, so that no file can run code.

torch reads `.metadata` by pickle, which calls any function that the file names, and entries that are no tensors without
its safe mode. Therefore this module reads `.metadata` first, and accepts nothing but the classes that torch writes
there. It refuses entries that are no tensors. All other entries, and `common.pt`, are read in torch's safe mode
(`weights_only`), which accepts tensors and plain values.

The bytes of `common.pt` are checked by torch's own sums. Those of tensors are checked when they are read
(`checkpoints.checked_reads`). `.metadata` has no sum.

Each file is read before it is parsed, so that an error of the disk stays what it is: torch and `pickle` tell less.
"""

import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import torch
from megatron.core.dist_checkpointing.core import maybe_load_config
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_rl.checkpoints.archives import check_archive
from megatron_rl.checkpoints.damage import DamagedCheckpointError, may_pass

COMMON, METADATA_FILE, COMPLETE_FILE = "common.pt", ".metadata", "metadata.json"
"""Plain values, places of tensors, and what Megatron writes last: the names of its formats."""

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILES = "torch.distributed.checkpoint.filesystem"
_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (_FILES, "_StorageInfo"),
        (_FILES, "_StoragePrefix"),
        *[
            (_METADATA, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ],
        *[(_PLANNER, name) for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")],
        (_PLANNER, "WriteItemType"),
    }
)
"""What `.metadata` may name beside types of elements."""
_NEVER_READ = ("generators/", "_extra_state/")
"""In the names of objects in checkpoints of older versions, which `load` does not ask for."""

_ERRORS_OF_READING = (
    *(OSError, EOFError, RuntimeError, ValueError, OverflowError),
    *(IndexError, KeyError, AttributeError, TypeError),
)
"""Of the disk, torch, `json` and `pickle`."""

_Value = TypeVar("_Value")


def check_files(path: Path) -> tuple[dict[str, object], frozenset[str]]:
    """Values of the checkpoint that are no tensors, and names of its tensors.

    Raises:
        DamagedCheckpointError: a file is missing or damaged, or could run code if it were loaded.
        OSError: a file cannot be read now.
    """
    _checked(path / COMPLETE_FILE, lambda _: maybe_load_config(str(path)))
    metadata = _checked(path / METADATA_FILE, _read_metadata)
    common = _checked(path / COMMON, _read_common)
    return common, frozenset(metadata.state_dict_metadata)


class _Unpickler(pickle.Unpickler):
    """Accepts only the names that `.metadata` may contain."""

    def find_class(self, module: str, name: str) -> object:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"names `{module}.{name}`")


def _read_metadata(file: Path) -> Metadata:
    stream = BytesIO(file.read_bytes())
    metadata = _Unpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"holds a `{type(metadata).__name__}`")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata) and not any(known in name for known in _NEVER_READ):
            raise pickle.UnpicklingError(f"says that `{name}` is an object instead of a tensor")
    for info in (metadata.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path:
            raise pickle.UnpicklingError(f"refers to the file {info.relative_path}")
    return metadata


def _read_common(file: Path) -> dict[str, object]:
    stream = BytesIO(file.read_bytes())
    check_archive(stream, begin=0, size=len(stream.getbuffer()))
    stream.seek(0)
    common: dict[str, object] = torch.load(stream, map_location="cpu", weights_only=True)
    return common


def _checked(file: Path, read: Callable[[Path], _Value]) -> _Value:
    try:
        return read(file)
    except pickle.UnpicklingError as error:
        raise DamagedCheckpointError(_refusal(file, str(error).strip().partition("\n")[0])) from error
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{file} is damaged ({error})") from error
    except _ERRORS_OF_READING as error:
        if may_pass(error):
            raise
        raise DamagedCheckpointError(f"{file} is damaged ({type(error).__name__}: {error})") from error


def _refusal(file: Path, what: str) -> str:
    return (
        f"{file} {what}, which no checkpoint of megatron-rl does: it is damaged, or it was made to run code. Nothing "
        "was loaded. Resume from a directory that you or people you trust have written"
    )
