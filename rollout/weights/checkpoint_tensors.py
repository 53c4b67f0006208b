"""Lists the tensors that a model's checkpoint holds, from its `config.json` alone.

An engine compares every manifest with this list before it touches a weight. The list comes from the reference
implementation of the architecture, built on the meta device without memory. So it shares no code with the trainer's
table of names or with vLLM's loaders.

Invariant: `expected_tensors` is sorted by name; tied weights appear once.
"""

from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.types import WeightVersion
from rollout.weights.format import WeightFormat
from rollout.weights.manifest import TensorSpec, WeightManifest


def expected_tensors(directory: str, format: WeightFormat) -> tuple[TensorSpec, ...]:
    """Return every tensor of a publish in `format`, sorted by name.

    Args:
        directory: a Hugging Face model directory; only `config.json` is read.
        format: the weight format with its exceptions.
    """
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    specs: list[TensorSpec] = []
    for held, tensor in model.state_dict().items():
        if held == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for name, shape in _unfused(held, tuple(tensor.shape)):
            specs += _as_sent(name, shape, format, config.num_hidden_layers)
    return tuple(sorted(specs, key=lambda spec: spec.name))


def _unfused(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a publish for one of Transformers', which stacks a layer's experts too, but fuses gate and up."""
    parent, _, leaf = name.rpartition(".")
    if not parent.endswith(".experts") or leaf not in ("gate_up_proj", "down_proj"):
        yield name, shape
    elif leaf == "down_proj":
        yield f"{name}.weight", shape
    else:
        count, rows, columns = shape
        yield f"{parent}.gate_proj.weight", (count, rows // 2, columns)
        yield f"{parent}.up_proj.weight", (count, rows // 2, columns)


def linears_in_bf16(expected: tuple[TensorSpec, ...]) -> tuple[str, ...]:
    """Names of the decoder layers' linears, including routers, that stay BF16 in an 8-bit format."""
    return tuple(
        name.removesuffix(".weight")
        for spec in expected
        if _is_matrix(spec.name, spec.shape) and spec.dtype == "bfloat16"
        for name in spec.unstacked
    )


def _as_sent(name: str, shape: tuple[int, ...], format: WeightFormat, num_layers: int) -> tuple[TensorSpec, ...]:
    layout = format.layout
    if layout is not None and _has_codes(name, shape) and not format.excepts(name, num_layers):
        grid = (*shape[:-2], *layout.grid(shape[-2:]))
        scale = TensorSpec(name=name + layout.scale_suffix, shape=grid, dtype="float32")
        return TensorSpec(name=name, shape=shape, dtype=layout.dtype), scale
    return (TensorSpec(name=name, shape=shape, dtype="bfloat16"),)


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix of a decoder layer, or a stack of them."""
    return ".layers." in name and name.endswith(".weight") and len(shape) >= 2


def _has_codes(name: str, shape: tuple[int, ...]) -> bool:
    """Whether an 8-bit format quantises the tensor: all matrices but routers, whose choices must not be rounded."""
    return _is_matrix(name, shape) and not name.endswith(".mlp.gate.weight")


def differences(manifest: WeightManifest, expected: tuple[TensorSpec, ...]) -> list[str]:
    """Return one line per tensor that differs between a manifest and the model's tensors; empty if none."""
    sent = {spec.name: spec for spec in manifest.tensors}
    required = {spec.name: spec for spec in expected}
    lines = [f"{name} is missing" for name in required.keys() - sent.keys()]
    lines += [f"{name} is unknown to the model" for name in sent.keys() - required.keys()]
    lines += [
        f"{name} is {list(sent[name].shape)} {sent[name].dtype}, the model needs {list(spec.shape)} {spec.dtype}"
        for name, spec in required.items()
        if name in sent and sent[name] != spec
    ]
    if len(sent) != len(manifest.tensors):
        lines.append(f"{len(manifest.tensors) - len(sent)} tensors are named twice")
    return sorted(lines)


def check_publish(manifest: WeightManifest, *, run_id: str, format: str, current: WeightVersion) -> None:
    """Raise `RuntimeError` unless a manifest belongs to run `run_id`, `format`, and a version after `current`."""
    if manifest.run_id != run_id:
        raise RuntimeError(f"manifest is of run {manifest.run_id!r}, the engine belongs to {run_id!r}")
    if manifest.weight_version <= current:
        raise RuntimeError(f"weight version {manifest.weight_version} is stale: the engine has {current}")
    if manifest.format != format:
        raise RuntimeError(f"manifest is in format {manifest.format!r}, the engine holds {format!r}")


def check_plan(manifest: WeightManifest, expected: tuple[TensorSpec, ...]) -> None:
    """Raise `RuntimeError` unless a manifest is consistent and has the model's tensors. The version does not matter."""
    if lines := differences(manifest, expected):
        shown = "; ".join(lines[:5])
        raise RuntimeError(f"{len(lines)} tensors do not fit the model: {shown}")
    manifest.check()
