"""Checks the safetensors files of a Hugging Face directory by their headers: complete, and of the right model.

A file starts with the length of its header (8 bytes, little endian) and the header: JSON with dtype, shape and byte
range of each tensor, counted from the header's end. Only headers are read. So an incomplete download or a directory of
another model is refused within milliseconds, before any process starts. `check_tied_output` alone reads weights.
Pure: imports no torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
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
_READ_BYTES = 1 << 24
"""Bytes of each matrix that are in memory while two are compared."""

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies, from the header of its file."""

    path: Path
    dtype: str
    """In the words of safetensors: `BF16`, `F32`."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    num_bytes: int


StoredTensors = dict[str, StoredTensor]


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


def file_tensors(path: Path) -> StoredTensors:
    """The tensors of one file, by name.

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
        tensors = _read_entries(json.loads(header), path, _LENGTH_BYTES + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: its header is corrupt ({type(error).__name__}: {error}); fetch it again") from error
    expected = max((tensor.start + tensor.num_bytes for tensor in tensors.values()), default=_LENGTH_BYTES + length)
    if expected != size:
        fault = "cut short" if size < expected else "not the file that its header describes"
        raise ValueError(f"{path} has {size} bytes, its header says {expected}: it is {fault}; fetch it again")
    return tensors


def _read_entries(entries: Mapping[str, Mapping[str, object]], path: Path, begin: int) -> StoredTensors:
    """The tensors of a file whose data begin at byte `begin`; raises for an entry that contradicts itself."""
    tensors: StoredTensors = {}
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
        tensors[name] = StoredTensor(
            path=path, dtype=dtype, shape=tuple(map(int, shape)), start=begin + start, num_bytes=stop - start
        )
    return tensors


def directory_tensors(directory: Path) -> StoredTensors:
    """The tensors of `directory`, by name; files that its index does not name are not read.

    Raises:
        ValueError: as `weight_files` and `file_tensors` do, or two files hold the same tensor.
    """
    found: StoredTensors = {}
    for path in weight_files(directory):
        for name, tensor in file_tensors(path).items():
            if name in found:
                raise ValueError(
                    f"{directory}: {found[name].path.name} and {path.name} both hold {name}; remove the file that is "
                    "not of this model, or fetch the directory again"
                )
            found[name] = tensor
    return found


def check_shapes(actual: StoredTensors, spec: ModelSpec, directory: Path) -> None:
    """Compare names and shapes of a directory with those of the model.

    Raises:
        ValueError: naming the missing, unexpected and wrongly shaped tensors.
    """
    expected = hf_shapes(spec)
    # Some tied checkpoints contain the output layer too, a copy of the embedding.
    allowed = {_OUTPUT: expected[_EMBEDDING]} if spec.tied else {}
    known = expected | allowed
    unexpected = {name for name in actual.keys() - known.keys() if not name.endswith(_IGNORED_SUFFIXES)}
    shapes = {
        f"{name} is {list(actual[name].shape)}, not {list(known[name])}"
        for name in actual.keys() & known.keys()
        if actual[name].shape != known[name]
    }
    problems = {"missing": expected.keys() - actual.keys(), "unexpected": unexpected, "of another shape": shapes}
    lines = [_listed(problem, names) for problem, names in problems.items() if names]
    if lines:
        raise ValueError(
            f"{directory} does not hold the {spec.family} model of its config.json: {'; '.join(lines)}; "
            "config.json and weights must come from the same model"
        )


def check_tied_output(actual: StoredTensors, spec: ModelSpec, directory: Path) -> None:
    """Compare the output layer that a tied model's files hold with the embedding; reads both, a part at a time.

    Call it once before a start, after `check_shapes`: trainer ranks read the embedding alone.

    Raises:
        ValueError: they differ, so config.json describes another model.
    """
    if not spec.tied or _OUTPUT not in actual:
        return
    embedding, output = actual[_EMBEDDING], actual[_OUTPUT]
    if embedding.dtype != output.dtype or not _hold_equal_bytes(embedding, output):
        raise ValueError(
            f"{directory}: config.json says tie_word_embeddings = true, but {_OUTPUT} ({output.dtype}) is no copy of "
            f"{_EMBEDDING} ({embedding.dtype}) and would be lost; set tie_word_embeddings to false, or remove {_OUTPUT}"
        )


def _hold_equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if one.num_bytes != other.num_bytes:
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        cuts = [*range(0, one.num_bytes, _READ_BYTES), one.num_bytes]
        return all(first.read(stop - start) == second.read(stop - start) for start, stop in pairwise(cuts))


def _listed(problem: str, names: set[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{problem}: {', '.join(shown)}{more}"
