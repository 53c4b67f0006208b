"""Fingerprint of the weights that a worker's model holds, computed by the kernels that it samples with.

See `rollout.weights.fingerprint`. Products of a layer are taken when it has been loaded and repacked into the memory
that it is sampled from, while its weights are in a cache. They stay on the device. Sums are folded at the end, after
one transfer to the host. The model must not run a forward at the same time.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rollout.weights.fingerprint import Sums, column_signs, expert_inputs, fold, products_of
from rollout.weights.manifest import Box, TensorSpec, of_expert
from rollout.worker.loader_recording import Landing

_LAST_OF_EXPERT = "w2_weight"
"""vLLM's parameter that stacks the down projections of a layer's experts."""


class CountedLandings:
    """The landings that a rank's fingerprint includes, by module; equal for all publishes of a run."""

    def __init__(
        self, landings: Sequence[Landing], specs: Sequence[TensorSpec], counted: Collection[tuple[str, Box]]
    ) -> None:
        """Choose landings.

        Scales have no sums, because they are part of every product.

        Args:
            landings: where the model's loaders copied each box.
            specs: the tensors of a publish.
            counted: tensor and box of each box that the fingerprint includes.
        """
        self.shapes: Mapping[str, tuple[int, ...]] = {spec.name: spec.shape for spec in specs}
        self.by_module: dict[str, list[Landing]] = {}
        for landing in landings:
            is_summed = landing.parameter in ("weight", "bias", _LAST_OF_EXPERT)
            if is_summed and (landing.name, landing.box) in counted:
                self.by_module.setdefault(landing.module, []).append(landing)


class LoadedSums:
    """Sums of one publish on one rank, module by module."""

    def __init__(self, model: torch.nn.Module, landings: CountedLandings, dtype: torch.dtype) -> None:
        """Begin; `dtype` is that of activations."""
        self._model = model
        self._landings = landings
        self._dtype = dtype
        self._rows: list[tuple[str, Box, tuple[int, ...], torch.Tensor]] = []
        """Tensor, box, shape of the tensor, and products of the box's rows."""
        self._done: set[str] = set()

    @torch.inference_mode()  # as forwards: kernels of experts write into scratch memory that a forward has made
    def add(self, module: str) -> None:
        """Take the products of a module that is completely loaded; a second call for it changes nothing."""
        if module in self._done:
            return
        self._done.add(module)
        layer = self._model.get_submodule(module)
        products: dict[Box, torch.Tensor] = {}
        experts: torch.Tensor | None = None
        for landing in self._landings.by_module.get(module, []):
            name, box, shape = landing.name, landing.box, self._landings.shapes[landing.name]
            if landing.parameter == _LAST_OF_EXPERT:
                if experts is None:
                    experts = _through_experts(layer, shape[1], self._dtype)
                rows = experts[landing.start // shape[1]]
                self._rows.append((of_expert(name, box.expert), box.in_matrix, shape[1:], rows))
                continue
            if len(shape) == 1:
                outputs: torch.Tensor = getattr(layer, landing.parameter).float().unsqueeze(0)
            else:
                columns = Box(start=box.start[1:], shape=box.shape[1:])
                if columns not in products:
                    products[columns] = _product(layer, box, shape, self._dtype)
                outputs = products[columns]
            self._rows.append((name, box, shape, outputs[:, landing.start : landing.start + box.shape[0]]))

    def fingerprint(self) -> dict[str, Sums]:
        """Sums of each tensor's boxes on this rank, float64 [2, S, G] by name; each expert's tensor has its own name.

        Takes the products of modules that were not added.
        """
        for module in self._landings.by_module:
            self.add(module)
        found: dict[str, Sums] = {}
        if not self._rows:
            return found
        joined = torch.cat([rows.flatten().float() for *_, rows in self._rows]).cpu()
        parts = torch.split(joined, [rows.numel() for *_, rows in self._rows])
        for (name, box, shape, rows), part in zip(self._rows, parts, strict=True):
            sums = fold(part.view(rows.shape), box, shape)
            found[name] = found[name] + sums if name in found else sums
        return found


def _through_experts(layer: torch.nn.Module, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Outputs of each expert, or of this rank's rows of it, for `expert_inputs`: [experts, tokens, hidden].

    Kernels take as many experts for a token as the model does (vLLM 0.25.1: `MoEPermuteScratch.validate`). All but the
    first have the weight 0.
    """
    method = layer.quant_method
    assert isinstance(method, FusedMoEMethodBase)
    if method.is_monolithic:
        raise RuntimeError(
            f"{type(method).__name__} chooses experts itself, so the outputs of one expert cannot be computed"
        )
    inputs = expert_inputs(hidden_size)
    count = cast(int, layer.local_num_experts)
    device = next(layer.parameters()).device
    per_token = cast(int, layer.top_k)
    first = torch.arange(count, device=device).repeat_interleave(len(inputs)).unsqueeze(1)
    chosen = (first + torch.arange(per_token, device=device)) % count
    weights = torch.zeros(chosen.shape, device=device)
    weights[:, 0] = 1.0
    outputs: torch.Tensor = method.apply(
        layer=layer,
        x=inputs.to(device, dtype).repeat(count, 1),
        topk_weights=weights,
        topk_ids=chosen.to(method.topk_indices_dtype or torch.int32),
        shared_experts=None,
        shared_experts_input=None,
    )
    return outputs.view(count, len(inputs), hidden_size)


def _product(layer: torch.nn.Module, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A layer's outputs without bias for the signs of a box's columns, [S, outputs of this rank]."""
    weight = layer.weight
    if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
        assert isinstance(weight, torch.Tensor)
        whole = Box(start=(0, box.start[1]), shape=tuple(weight.shape))
        return products_of(weight.detach(), whole, shape)
    method: LinearMethodBase = layer.quant_method
    device = next(layer.parameters()).device
    outputs: torch.Tensor = method.apply(layer, column_signs(box, shape).to(device, dtype), None)
    return outputs
