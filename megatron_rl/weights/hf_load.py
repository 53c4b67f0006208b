"""Loads a Hugging Face directory into this rank's part of the model.

Each rank reads only the boxes that its placements name, straight from the memory-mapped safetensors
files into its parameters; no tensor is ever whole in memory (parameters that are FP8 take their weights all at once:
`megatron_rl.weights.te_primary`). Before the first byte is read, the names
and shapes of the directory are compared with what the model needs, so that a wrong directory fails with
one message that says what is missing, unexpected or of another shape.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_rl.model_config import ModelSpec
from megatron_rl.weights import te_primary
from megatron_rl.weights.names import Placement, hf_shapes

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and every reader computes itself."""

_SHOWN = 5


class HfTensors:
    """The open safetensors files of one directory."""

    def __init__(self, files: Mapping[str, safe_open]) -> None:
        self._files = files

    @property
    def names(self) -> set[str]:
        """All tensors of the directory."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def box(self, placement: Placement) -> torch.Tensor:
        """The placement's box, in the dtype of the file, on the CPU."""
        whole = self._files[placement.hf_name].get_slice(placement.hf_name)  # type: ignore[no-untyped-call]
        box: torch.Tensor = whole[placement.hf_slices]
        return box


@contextmanager
def open_tensors(directory: Path) -> Iterator[HfTensors]:
    """Open every safetensors file of `directory`.

    Raises:
        ValueError: there is none, or the index names a file that is not there.
    """
    with ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for path in _files(directory):
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            files.update(dict.fromkeys(file.keys(), file))
        yield HfTensors(files)


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{directory} holds no *.safetensors file; needs a Hugging Face model directory")
        return paths
    paths = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if absent := [path.name for path in paths if not path.exists()]:
        raise ValueError(f"{index} names {absent[0]}, which is not there; the download is incomplete")
    return paths


def check_tensors(tensors: HfTensors, spec: ModelSpec, directory: Path) -> None:
    """Compare names and shapes of a directory with those of the model.

    Raises:
        ValueError: naming the missing, unexpected and wrongly shaped tensors.
    """
    wanted, found = hf_shapes(spec), tensors.names
    # Some tied checkpoints carry the output layer as well; it is the embedding again.
    allowed = {"lm_head.weight"} if spec.tied else set()
    unexpected = {n for n in found - wanted.keys() - allowed if not n.endswith(_IGNORED_SUFFIXES)}
    shapes = {
        f"{name} is {list(shape)}, not {list(wanted[name])}"
        for name in found & wanted.keys()
        if (shape := tensors.shape(name)) != wanted[name]
    }
    problems = {"missing": wanted.keys() - found, "unexpected": unexpected, "of another shape": shapes}
    lines = [_listed(what, names) for what, names in problems.items() if names]
    if lines:
        raise ValueError(f"{directory} does not hold the {spec.family} model of its config.json: {'; '.join(lines)}")


def _listed(what: str, names: set[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(shown)}{more}"


@torch.no_grad()
def load(model: torch.nn.Module, placements: tuple[Placement, ...], spec: ModelSpec, directory: Path) -> None:
    """Fill the parameters of a model chunk; padded vocabulary rows become zero.

    `placements` are this rank's, with the names of the layers that the model was built of. Each rank
    loads for itself: no communication.

    Raises:
        ValueError: the directory does not fit the model.
        RuntimeError: placements and parameters do not cover each other.
    """
    parameters = dict(model.named_parameters())
    _check_coverage(parameters, placements)
    boxes: dict[str, list[Placement]] = {name: [] for name in parameters}
    for placement in placements:
        boxes[placement.megatron_name].append(placement)
    with open_tensors(directory) as tensors:
        check_tensors(tensors, spec, directory)
        for name, parameter in parameters.items():
            fp8 = parameter if te_primary.is_primary(parameter) else None
            weight = parameter if fp8 is None else torch.empty(fp8.shape, dtype=fp8.dtype)
            weight.zero_()
            for box in boxes[name]:
                weight[box.megatron_slices].copy_(tensors.box(box))
            if fp8 is not None:
                te_primary.fill(fp8, weight)


def _check_coverage(parameters: Mapping[str, torch.nn.Parameter], placements: tuple[Placement, ...]) -> None:
    placed = {placement.megatron_name for placement in placements}
    # A rank whose vocabulary rows are all padding holds a parameter without a placement.
    unplaced = {
        n for n in parameters.keys() - placed if not n.endswith(("word_embeddings.weight", "output_layer.weight"))
    }
    if absent := placed - parameters.keys():
        raise RuntimeError(f"placements name {sorted(absent)[0]}, which the model does not have")
    if unplaced:
        raise RuntimeError(f"no placement fills parameter {sorted(unplaced)[0]}")
