"""Checks the safetensors files of a Hugging Face directory by their headers: complete, and of the right model.

A file starts with the length of its header (8 bytes, little endian) and the header: JSON with dtype, shape and byte
range of each tensor, counted from the header's end. Only headers are read. So an incomplete download or a directory of
another model is refused within milliseconds, before any process starts. Pure: imports no torch.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.shards import hf_shapes

INDEX = "model.safetensors.index.json"

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Suffixes of buffers that old checkpoints contain and every reader computes itself."""

_SHOWN = 5
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Upper bound of a header in bytes, given by the format."""

_LFS = b"version https://git-lfs"
_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
Shapes = dict[str, tuple[int, ...]]


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of `directory`: those that its index names, or all without an index.

    Raises:
        ValueError: there is no such file, or the index is corrupt or names a missing file.
    """
    index = directory / INDEX
    if not index.exists():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{directory} holds no *.safetensors file; needs a Hugging Face model directory")
        return paths
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of weights ({type(error).__name__}: {error}); fetch it again") from error
    paths = [directory / name for name in sorted(names)]
    if absent := [path.name for path in paths if not path.exists()]:
        raise ValueError(f"{index} names {absent[0]}, which is not there; the download is incomplete")
    return paths


def file_shapes(path: Path) -> Shapes:
    """Name and shape of each tensor of one file.

    Raises:
        ValueError: the header is corrupt, or the file is shorter or longer than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(max(_LENGTH_BYTES, len(_LFS)))
        if begin.startswith(_LFS):
            raise ValueError(f"{path} is a pointer of Git LFS, not the weights; run `git lfs pull` in its repository")
        length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
        most = min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES)
        if len(begin) < _LENGTH_BYTES or length > most:
            raise ValueError(
                f"{path}: its header would be {length} bytes long, but the file of {size} bytes has room for "
                f"{max(most, 0)}; the file is corrupt or cut short: fetch it again"
            )
        file.seek(_LENGTH_BYTES)
        header = file.read(length)
    try:
        entries = json.loads(header)
        shapes, end = _read_entries(entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: its header is corrupt ({type(error).__name__}: {error}); fetch it again") from error
    expected = _LENGTH_BYTES + length + end
    if expected != size:
        fault = "cut short" if size < expected else "not the file that its header describes"
        raise ValueError(f"{path} has {size} bytes, its header says {expected}: it is {fault}; fetch it again")
    return shapes


def _read_entries(entries: Mapping[str, Mapping[str, object]]) -> tuple[Shapes, int]:
    """Shapes, and the byte at which the last tensor ends; raises for an entry that contradicts itself."""
    shapes: Shapes = {}
    end = 0
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        shape, offsets, dtype = entry["shape"], entry["data_offsets"], str(entry["dtype"])
        if not isinstance(shape, list) or not isinstance(offsets, list):
            raise ValueError(f"tensor {name} has shape {shape!r} and data_offsets {offsets!r}")
        start, stop = (int(offset) for offset in offsets)
        num_bytes = math.prod(map(int, shape)) * _ELEMENT_BYTES.get(dtype, 0)
        if start < 0 or stop < start or (num_bytes != stop - start and dtype in _ELEMENT_BYTES):
            raise ValueError(f"tensor {name} is {dtype} {shape} at bytes {start} to {stop}")
        shapes[name] = tuple(map(int, shape))
        end = max(end, stop)
    return shapes, end


def directory_shapes(directory: Path) -> Shapes:
    """Name and shape of each tensor of `directory`; raises as `weight_files` and `file_shapes` do."""
    return {name: shape for path in weight_files(directory) for name, shape in file_shapes(path).items()}


def check_shapes(actual: Shapes, spec: ModelSpec, directory: Path) -> None:
    """Compare names and shapes of a directory with those of the model.

    Raises:
        ValueError: naming the missing, unexpected and wrongly shaped tensors.
    """
    expected = hf_shapes(spec)
    # Some tied checkpoints contain the output layer too, a copy of the embedding.
    allowed = {"lm_head.weight"} if spec.tied else set()
    unexpected = {name for name in actual.keys() - expected.keys() - allowed if not name.endswith(_IGNORED_SUFFIXES)}
    shapes = {
        f"{name} is {list(actual[name])}, not {list(expected[name])}"
        for name in actual.keys() & expected.keys()
        if actual[name] != expected[name]
    }
    problems = {"missing": expected.keys() - actual.keys(), "unexpected": unexpected, "of another shape": shapes}
    lines = [_listed(problem, names) for problem, names in problems.items() if names]
    if lines:
        raise ValueError(
            f"{directory} does not hold the {spec.family} model of its config.json: {'; '.join(lines)}; "
            "config.json and weights must come from the same model"
        )


def _listed(problem: str, names: set[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{problem}: {', '.join(shown)}{more}"
