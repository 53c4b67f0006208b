"""Loads a Hugging Face directory into this rank's parameters.

Each rank reads only the boxes of its shards, from the memory-mapped safetensors files directly into its parameters. No
tensor is ever whole in memory, except FP8 parameters, which need all their weights at once
(`megatron_rl.quantization.fp8_parameters`). Before the first byte is read, names and shapes of the directory are
compared with the model. So a wrong directory fails with one message that names missing, unexpected and wrongly shaped
tensors.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_rl.model.spec import ModelSpec
from megatron_rl.quantization import fp8_parameters
from megatron_rl.weights.shards import Shard
from megatron_rl.weights.weight_files import check_shapes, directory_tensors, weight_files
from rollout import progress


class HfTensors:
    """The open safetensors files of one directory."""

    def __init__(self, files: Mapping[str, safe_open]) -> None:
        self._files = files

    def box(self, shard: Shard) -> torch.Tensor:
        """The shard's box, in the dtype of the file, on the CPU."""
        whole = self._files[shard.hf_name].get_slice(shard.hf_name)  # type: ignore[no-untyped-call]
        box: torch.Tensor = whole[shard.hf_slices]
        return box


@contextmanager
def open_tensors(directory: Path) -> Iterator[HfTensors]:
    """Open every safetensors file of `directory`.

    Raises:
        ValueError: the directory has no such file, or the index names a missing file.
    """
    with ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for path in weight_files(directory):
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            files.update(dict.fromkeys(file.keys(), file))
        yield HfTensors(files)


@torch.no_grad()
def load(model: torch.nn.Module, shards: tuple[Shard, ...], spec: ModelSpec, directory: Path) -> None:
    """Fill the parameters of a model chunk; padded vocabulary rows become zero.

    `shards` are this rank's, with the parameter names of the model's layers. Ranks load without communication.

    Raises:
        ValueError: the directory does not fit the model.
        RuntimeError: a shard has no parameter, or a parameter has no shard.
    """
    parameters = dict(model.named_parameters())
    _check_coverage(parameters, shards)
    held: dict[str, list[Shard]] = {name: [] for name in parameters}
    for shard in shards:
        held[shard.megatron_name].append(shard)
    check_shapes(directory_tensors(directory), spec, directory)
    with open_tensors(directory) as tensors:
        for name, parameter in parameters.items():
            progress.mark(f"read {name}")
            fp8 = parameter if fp8_parameters.is_fp8_parameter(parameter) else None
            weight = parameter if fp8 is None else torch.empty(fp8.shape, dtype=fp8.dtype)
            weight.zero_()
            for shard in held[name]:
                weight[shard.megatron_slices].copy_(tensors.box(shard))
            if fp8 is not None:
                fp8_parameters.fill(fp8, weight)


def _check_coverage(parameters: Mapping[str, torch.nn.Parameter], shards: tuple[Shard, ...]) -> None:
    placed = {shard.megatron_name for shard in shards}
    # A rank whose vocabulary rows are all padding holds a parameter without a shard.
    unplaced = {
        n for n in parameters.keys() - placed if not n.endswith(("word_embeddings.weight", "output_layer.weight"))
    }
    if absent := placed - parameters.keys():
        raise RuntimeError(f"shards name {sorted(absent)[0]}, which the model does not have")
    if unplaced:
        raise RuntimeError(f"no shard fills parameter {sorted(unplaced)[0]}")
