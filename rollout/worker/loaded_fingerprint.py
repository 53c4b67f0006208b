"""Fingerprint of the weights that a worker's model holds, computed by the kernels that it samples with.

See `rollout.weights.fingerprint`. The model must not run a forward at the same time.
"""

from collections.abc import Collection, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rollout.weights.fingerprint import column_signs, expert_inputs, fold, multiply
from rollout.weights.manifest import Box, TensorSpec, of_expert
from rollout.worker.loader_recording import Landing

_LAST_OF_EXPERT = "w2_weight"
"""vLLM's parameter that stacks the down projections of a layer's experts."""


@torch.no_grad()
def loaded_fingerprint(
    model: torch.nn.Module,
    landings: Sequence[Landing],
    specs: Sequence[TensorSpec],
    counted: Collection[tuple[str, Box]],
    dtype: torch.dtype,
) -> dict[str, npt.NDArray[np.float64]]:
    """Sums of each tensor's boxes on this rank, float64 [2, S, G] by name; each expert's tensor has its own name.

    Scales have no sums, because they are part of every product.

    Args:
        model: the worker's model.
        landings: where its loaders copied each box.
        specs: the tensors of a publish.
        counted: tensor and box of each box that this rank's fingerprint includes.
        dtype: dtype of activations.
    """
    shapes = {spec.name: spec.shape for spec in specs}
    products: dict[tuple[str, Box], torch.Tensor] = {}
    fingerprint: dict[str, npt.NDArray[np.float64]] = {}
    experts: dict[str, torch.Tensor] = {}
    for landing in landings:
        name, box, shape = landing.name, landing.box, shapes[landing.name]
        if landing.parameter not in ("weight", "bias", _LAST_OF_EXPERT) or (name, box) not in counted:
            continue
        layer = model.get_submodule(landing.module)
        if landing.parameter == _LAST_OF_EXPERT:
            name, box, shape = of_expert(name, box.expert), box.in_matrix, shape[1:]
            if landing.module not in experts:
                experts[landing.module] = _through_experts(layer, shape[0], dtype)
            sums = fold(experts[landing.module][landing.start // shape[0]], box, shape)
            fingerprint[name] = fingerprint[name] + sums if name in fingerprint else sums
            continue
        if len(shape) == 1:
            rows: torch.Tensor = getattr(layer, landing.parameter).unsqueeze(0)
        else:
            columns = Box(start=box.start[1:], shape=box.shape[1:])
            key = landing.module, columns
            if key not in products:
                products[key] = _product(layer, column_signs(box, shape), dtype)
            rows = products[key]
        sums = fold(rows[:, landing.start : landing.start + box.shape[0]], box, shape)
        fingerprint[name] = fingerprint[name] + sums if name in fingerprint else sums
    return fingerprint


def _through_experts(layer: torch.nn.Module, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Outputs of each expert, or of this rank's rows of it, for `expert_inputs`: [experts, tokens, hidden]."""
    method = layer.quant_method
    assert isinstance(method, FusedMoEMethodBase)
    if method.is_monolithic:
        raise RuntimeError(
            f"{type(method).__name__} chooses experts itself, so the outputs of one expert cannot be computed"
        )
    inputs = expert_inputs(hidden_size)
    count = cast(int, layer.local_num_experts)
    device = next(layer.parameters()).device
    chosen = torch.arange(count, device=device, dtype=method.topk_indices_dtype or torch.int32)
    outputs: torch.Tensor = method.apply(
        layer=layer,
        x=inputs.to(device, dtype).repeat(count, 1),
        topk_weights=torch.ones(count * len(inputs), 1, device=device),
        topk_ids=chosen.repeat_interleave(len(inputs)).unsqueeze(1),
        shared_experts=None,
        shared_experts_input=None,
    )
    return outputs.view(count, len(inputs), hidden_size)


def _product(layer: torch.nn.Module, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A layer's outputs without bias, [tokens, outputs of this rank]."""
    weight = layer.weight
    if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
        assert isinstance(weight, torch.Tensor)
        return multiply(weight, inputs)
    method: LinearMethodBase = layer.quant_method
    device = next(layer.parameters()).device
    outputs: torch.Tensor = method.apply(layer, inputs.to(device, dtype), None)
    return outputs
