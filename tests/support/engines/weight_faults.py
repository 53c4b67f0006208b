"""Faulty weights, each with the tensor by which the fault is detected."""

from collections.abc import Callable

import numpy as np
import torch

from rollout.weights.fingerprint import fold, of_box, through_expert
from rollout.weights.manifest import Box

Tensors = dict[str, torch.Tensor]
Fault = Callable[[Tensors], Tensors]

LAYER = "model.layers.1."
ATTENTION, MLP = f"{LAYER}self_attn.", f"{LAYER}mlp."


def exchanged(first: str, second: str) -> Fault:
    """Exchange two modules' weights and scales."""

    def fault(tensors: Tensors) -> Tensors:
        pairs = {f"{a}.{end}": f"{b}.{end}" for a, b in ((first, second), (second, first)) for end in ENDS}
        return {name: tensors[pairs.get(name, name)] for name in tensors}

    return fault


ENDS = ("weight", "weight_scale", "weight_scale_inv")


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return lambda tensors: {**tensors, name: change(tensors[name].clone()).contiguous()}


def one_doubled(scales: torch.Tensor) -> torch.Tensor:
    scales[77] *= 2
    return scales


def first_column_negated(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([-codes[:, :1], codes[:, 1:]], dim=1)


def stale(tensors: Tensors, old: Tensors) -> Tensors:
    """Replace one layer by that of another version."""
    return {name: old[name] if name.startswith(LAYER) else tensor for name, tensor in tensors.items()}


FAULTS: dict[str, tuple[str, Fault]] = {
    "keys and values exchanged": ("k_proj|v_proj", exchanged(f"{ATTENTION}k_proj", f"{ATTENTION}v_proj")),
    "gate and up exchanged": ("gate_proj|up_proj", exchanged(f"{MLP}gate_proj", f"{MLP}up_proj")),
    "norms exchanged": ("layernorm", exchanged(f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm")),
    "the other rank's rows": ("q_proj", changed(f"{ATTENTION}q_proj.weight", lambda w: w.roll(64, 0))),
    "the other rank's columns": ("down_proj", changed(f"{MLP}down_proj.weight", lambda w: w.roll(128, 1))),
    "a matrix transposed": ("o_proj", changed(f"{ATTENTION}o_proj.weight", lambda w: w.t())),
    "scales off by a row": ("up_proj", changed(f"{MLP}up_proj.weight_scale", lambda s: s.roll(1, 0))),
    "one scale doubled": ("down_proj", changed(f"{MLP}down_proj.weight_scale", one_doubled)),
    "a column's signs flipped": ("q_proj", changed(f"{ATTENTION}q_proj.weight", first_column_negated)),
    "embeddings off by a row": ("embed_tokens", changed("model.embed_tokens.weight", lambda w: w.roll(1, 0))),
    "the head negated": ("lm_head", changed("lm_head.weight", lambda w: -w)),
    "a norm not scaled": ("q_norm", changed(f"{ATTENTION}q_norm.weight", torch.ones_like)),
}


EXPERT = f"{MLP}experts.1."

OF_EXPERTS: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "as meant": lambda tensors, old: tensors,
    "two experts exchanged": lambda tensors, old: {
        name: tensors[_of_expert(name, {"1": "2", "2": "1"})] for name in tensors
    },
    "gate and up exchanged": lambda tensors, old: exchanged(f"{EXPERT}gate_proj", f"{EXPERT}up_proj")(tensors),
    "one expert stale": lambda tensors, old: {
        name: old[name] if name.startswith(EXPERT) else tensor for name, tensor in tensors.items()
    },
}
"""Faults of the experts of one layer; of the tensors and those of another version."""


def _of_expert(name: str, renamed: dict[str, str]) -> str:
    """The name with another expert's number, if it is one of the layer's."""
    prefix = f"{MLP}experts."
    if not name.startswith(prefix):
        return name
    number, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{renamed.get(number, number)}.{rest}"


def decoded(tensors: Tensors, name: str) -> torch.Tensor:
    """Decoded values of a tensor of a checkpoint."""
    values = tensors[name].float()
    if f"{name}_scale" in tensors:
        return values * tensors[f"{name}_scale"]
    if f"{name}_scale_inv" in tensors:
        scales = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return values * scales[: values.shape[0], : values.shape[1]]
    return values


def meant(tensors: Tensors) -> dict[str, np.ndarray]:
    """Fingerprint of a checkpoint's decoded values."""
    found = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            if name.endswith("down_proj.weight"):
                expert = name.removesuffix("down_proj.weight")
                parts = (decoded(tensors, f"{expert}{leaf}_proj.weight") for leaf in ("gate", "up", "down"))
                shape = tuple(tensor.shape)
                found[name] = fold(through_expert(*parts), Box(start=(0, 0), shape=shape), shape)
        elif not name.endswith(("_scale", "_scale_inv")):
            values = decoded(tensors, name)
            whole = Box(start=(0,) * values.dim(), shape=tuple(values.shape))
            found[name] = of_box(values, whole, tuple(values.shape))
    return found
