"""Writes the model as a Hugging Face directory, from any partition.

Every rank that owns a box of a tensor sends it to the writer (global rank 0), tensor by tensor in the order of the
model. The writer holds the tensors of one file at a time; no rank holds the whole model. The order follows from the
shards alone, so senders and writer agree without communication.

The directory is written under a temporary name and renamed when it is complete. Weights keep the trainer's dtype, so
Hugging Face -> Megatron -> Hugging Face is bitwise if the dtypes are equal. FP8 parameters are written decoded, in
BF16. The additional precision of their masters is in checkpoints only.
"""

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rl.config import ParallelConfig
from megatron_rl.model.build import PolicyModel, layer_names
from megatron_rl.model.parallel import Position, rank_at
from megatron_rl.quantization import fp8_parameters
from megatron_rl.weights.shards import Shard, hf_shapes, is_first_replica, rank_shards
from rollout import progress

WRITER = 0

_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
"""Suffixes of tokenizer, chat template and generation settings; weights and their index are written anew."""
_TEMPLATES = "additional_chat_templates"
"""Folder in which `transformers` saves all chat templates but the one named `default`."""

Roster = dict[str, list[tuple[int, tuple[Shard, ...]]]]
"""By Hugging Face name: the ranks that own boxes, with their shards."""


@torch.no_grad()
def export(
    model: PolicyModel,
    parallel: ParallelConfig,
    position: Position,
    *,
    source: Path,
    destination: Path,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write `destination` with configuration and tokenizer of `source`; all ranks must call it.

    When it returns on any rank, the directory is complete.

    Raises:
        ValueError: `destination` exists; raised on every rank.
    """
    is_writer = position.rank == WRITER
    _refuse_existing(destination, is_writer=is_writer)
    if position.data < parallel.expert:
        tensors = _whole_tensors(model, parallel, position.rank)
        if is_writer:
            _write(tensors, _shards(model, max_shard_bytes), _dtype(model), source, destination)
        else:
            for _ in tensors:
                pass
    dist.barrier()


def _refuse_existing(destination: Path, *, is_writer: bool) -> None:
    exists = [is_writer and destination.exists()]
    dist.broadcast_object_list(exists, src=WRITER)
    if exists[0]:
        raise ValueError(f"{destination} exists; an export does not overwrite: name another directory or remove it")


def _dtype(model: PolicyModel) -> torch.dtype:
    dtype: torch.dtype = model.config.params_dtype
    return dtype


def roster(model: PolicyModel, parallel: ParallelConfig) -> Roster:
    """Owners of every Hugging Face tensor among the first ranks that hold it."""
    owners: Roster = {name: [] for name in hf_shapes(model.spec)}
    places = itertools.product(range(parallel.pipeline), range(parallel.expert), range(parallel.tensor))
    for pipeline, data, tensor in places:
        boxes: dict[str, list[Shard]] = {}
        for shard in rank_shards(
            model.spec,
            parallel,
            tensor_rank=tensor,
            pipeline_rank=pipeline,
            data_rank=data,
            uses_te_layer_names=layer_names() == "te",
        ):
            if shard.owned and is_first_replica(shard, parallel, data):
                boxes.setdefault(shard.hf_name, []).append(shard)
        for name, owned in boxes.items():
            owners[name].append((rank_at(parallel, tensor=tensor, pipeline=pipeline, data=data), tuple(owned)))
    return owners


def _whole_tensors(model: PolicyModel, parallel: ParallelConfig, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """On the writer, every whole tensor, on the CPU; other ranks yield nothing and send their boxes."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    for name, owners in roster(model, parallel).items():
        progress.mark(f"collect {name}", kind="files")  # the writer may be writing a file
        whole = torch.empty(owners[0][1][0].hf_full_shape, dtype=_dtype(model)) if rank == WRITER else None
        for owner, boxes in owners:
            if owner == rank:
                flat = torch.cat(
                    [
                        fp8_parameters.values(parameters[box.megatron_name], box.megatron_slices).reshape(-1)
                        for box in boxes
                    ]
                )
            elif whole is not None:
                flat = torch.empty(sum(math.prod(box.shape) for box in boxes), dtype=_dtype(model), device=device)
                dist.recv(flat, src=owner)
            else:
                continue
            if whole is None:
                dist.send(flat, dst=WRITER)
            else:
                _paste(whole, boxes, flat.cpu())
        if whole is not None:
            yield name, whole


def _paste(whole: torch.Tensor, boxes: tuple[Shard, ...], flat: torch.Tensor) -> None:
    for box, values in zip(boxes, flat.split([math.prod(box.shape) for box in boxes]), strict=True):  # type: ignore[no-untyped-call]
        whole[box.hf_slices] = values.view(box.shape)


def _shards(model: PolicyModel, max_shard_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file, in the order of the model."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, shape in hf_shapes(model.spec).items():
        num_bytes = math.prod(shape) * _dtype(model).itemsize
        if shards[-1] and num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= num_bytes
    return shards


def _write(
    tensors: Iterator[tuple[str, torch.Tensor]],
    shards: list[list[str]],
    dtype: torch.dtype,
    source: Path,
    destination: Path,
) -> None:
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        shard = dict(next(tensors) for _ in names)
        progress.mark(f"write {file}", kind="files")
        save_file(shard, partial / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    _copy_rest(source, partial, dtype)
    partial.rename(destination)


def _copy_rest(source: Path, destination: Path, dtype: torch.dtype) -> None:
    for path in [*source.iterdir(), *(source / _TEMPLATES).glob("*.jinja")]:
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            copy = destination / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    config = json.loads((source / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
