"""The trainer's log-probabilities of a fixed prompt, and forwards under the weights that engines hold.

The probe of a publish runs the prompt through the trainer's own weights. Sums have shown that engines hold the codes of
these weights, so the probe has to show only that both sides compute the same function of them, up to 8-bit rounding.

`published_weights` replaces every parameter by its published value (after a round trip through the weight format).
Embedding and decoder layers are replaced one at a time, during their own forward, so no second copy of the model
exists. The output layer is read without a call, so it is replaced after the last layer. Parameters are replaced in
their modules; their contents are not overwritten, because an FP8 parameter would quantise the new values and keep them.

Matrix products are not in FP8 here, because that would quantise the weights a second time, which engines do not do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from megatron_rl.model.build import PolicyModel
from megatron_rl.model.fp8_compute import without_fp8
from megatron_rl.model.logprobs import TokenScores
from megatron_rl.model.packed_batch import pack_batch
from megatron_rl.trainer.messages import ProbeResult
from megatron_rl.trainer.pipeline import run_schedule

PublishedValues = Callable[[str], torch.Tensor]
"""Published value of a parameter, by its name inside the chunk."""

Swapped = list[tuple[torch.nn.Module, str, torch.nn.Parameter]]
"""Module, name of its parameter, and the parameter that belongs there."""


def probe(
    chunks: Sequence[torch.nn.Module],
    token_ids: Sequence[int],
    *,
    row_multiple: int,
    device: torch.device,
) -> ProbeResult | None:
    """Log-probabilities of `token_ids[1:]` at temperature 1; None before the last stage.

    `chunks` are wrapped by Megatron's DDP (`chunk.module` is the model). All ranks of the pipeline call it together.
    """
    ids = np.asarray(token_ids, dtype=np.int32)
    batch = pack_batch([(ids[:1], ids[1:])], multiple_of=row_multiple).to(device)

    def keep(number: int, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor]:
        del number
        return scores.logprobs.sum() * 0.0, scores.logprobs

    with torch.no_grad(), without_fp8(_models(chunks)):
        outcomes = run_schedule(chunks, [batch], keep, temperature=1.0, backward=False)
    return ProbeResult(logprobs=outcomes[0].float().cpu().numpy()) if outcomes else None


def _models(chunks: Sequence[torch.nn.Module]) -> list[PolicyModel]:
    models = [chunk.module for chunk in chunks]
    assert all(isinstance(model, PolicyModel) for model in models)
    return [model for model in models if isinstance(model, PolicyModel)]


@contextmanager
def published_weights(chunks: Sequence[torch.nn.Module], published: PublishedValues) -> Iterator[None]:
    """Within the context, forwards compute with published values, in the products of the engines' dtype.

    `chunks` are wrapped by Megatron's DDP.
    """
    models = _models(chunks)
    with without_fp8(models), _published(models, published):
        yield


@contextmanager
def _published(models: Sequence[PolicyModel], published: PublishedValues) -> Iterator[None]:
    handles: list[torch.utils.hooks.RemovableHandle] = []
    outer: Swapped = []
    try:
        for model in models:
            layers = {f"decoder.layers.{index}.": layer for index, layer in enumerate(model.decoder.layers)}
            embedding = {"embedding.": model.embedding} if model.pre_process else {}
            for prefix, module in (embedding | layers).items():
                handles += _hook(module, prefix, published)
            outer += _swap(model, "", published, but=("embedding.", "output_layer.", *layers))
            if model.post_process:
                handles.append(model.decoder.register_forward_hook(_output(model, published, outer)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        _restore(outer)


def _output(model: PolicyModel, published: PublishedValues, outer: Swapped) -> Callable[..., None]:
    """Hook that swaps in the published output weight after the decoder's forward."""
    prefix, module = "output_layer.", getattr(model, "output_layer", None)
    if model.pre_process and model.share_embeddings_and_output_weights:
        prefix, module = "embedding.", model.embedding

    swapped: Swapped = []

    def swap(*_: object) -> None:
        if module is not None and not swapped:  # it stays for further micro batches
            swapped.extend(_swap(module, prefix, published))
            outer.extend(swapped)

    return swap


def _hook(module: torch.nn.Module, prefix: str, published: PublishedValues) -> list[torch.utils.hooks.RemovableHandle]:
    swapped: Swapped = []

    def enter(*_: object) -> None:
        swapped.extend(_swap(module, prefix, published))

    def leave(*_: object) -> None:
        _restore(swapped)
        swapped.clear()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def _swap(root: torch.nn.Module, prefix: str, published: PublishedValues, *, but: tuple[str, ...] = ()) -> Swapped:
    """Replace parameters below `root` by published values, except those whose names begin with one of `but`."""
    swapped: Swapped = []
    for path, parameter in list(root.named_parameters()):
        if path.startswith(but):
            continue
        owner_path, _, leaf = path.rpartition(".")
        owner = root.get_submodule(owner_path)
        swapped.append((owner, leaf, parameter))
        owner.register_parameter(leaf, torch.nn.Parameter(published(prefix + path), parameter.requires_grad))
    return swapped


def _restore(swapped: Swapped) -> None:
    for owner, leaf, parameter in reversed(swapped):
        owner.register_parameter(leaf, parameter)
