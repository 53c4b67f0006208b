"""The trainer's half of a publish's proof: log-probabilities under the weights as the engines hold them.

A fixed prompt goes through the trainer's own model with every parameter replaced by its published value
(after the round trip through the wire format). Decoder layers are replaced one at a time, around their
own forward, so that no second copy of the model exists; embedding, final norm and output layer, which
are read outside a layer, for the whole pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from megatron_rl.logprobs import TokenScores
from megatron_rl.model import PolicyModel
from megatron_rl.packed_batch import pack_batch
from megatron_rl.pipeline import run_schedule
from megatron_rl.results import ProbeResult

PublishedValues = Callable[[str], torch.Tensor]
"""Published value of a parameter, by its name inside the chunk."""

Swapped = list[tuple[torch.nn.Parameter, torch.Tensor]]


def probe(
    chunks: Sequence[torch.nn.Module],
    published: PublishedValues,
    token_ids: Sequence[int],
    *,
    row_multiple: int,
    device: torch.device,
) -> ProbeResult | None:
    """Log-probabilities of `token_ids[1:]` at temperature 1 under published weights; None before the last stage.

    `chunks` are wrapped by Megatron's DDP (`chunk.module` is the model). Every rank of the pipeline enters.
    """
    ids = np.asarray(token_ids, dtype=np.int32)
    batch = pack_batch([(ids[:1], ids[1:])], multiple_of=row_multiple).to(device)

    def keep(number: int, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor]:
        del number
        return scores.logprobs.sum() * 0.0, scores.logprobs

    with torch.no_grad(), _published(chunks, published):
        outcomes = run_schedule(chunks, [batch], keep, temperature=1.0, backward=False)
    return ProbeResult(logprobs=outcomes[0].float().cpu().numpy()) if outcomes else None


@contextmanager
def _published(chunks: Sequence[torch.nn.Module], published: PublishedValues) -> Iterator[None]:
    handles = []
    outer: Swapped = []
    try:
        for chunk in chunks:
            model = chunk.module
            assert isinstance(model, PolicyModel)
            layers = {f"decoder.layers.{index}.": layer for index, layer in enumerate(model.decoder.layers)}
            for prefix, layer in layers.items():
                handles += _hook(layer, prefix, published)
            rest = [(name, p) for name, p in model.named_parameters() if not name.startswith(tuple(layers))]
            outer += _swap(rest, published)
        yield
    finally:
        for handle in handles:
            handle.remove()
        _restore(outer)


def _hook(layer: torch.nn.Module, prefix: str, published: PublishedValues) -> list[torch.utils.hooks.RemovableHandle]:
    own: Swapped = []

    def enter(*_: object) -> None:
        own.extend(_swap([(prefix + name, p) for name, p in layer.named_parameters()], published))

    def leave(*_: object) -> None:
        _restore(own)
        own.clear()

    return [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)]


def _swap(parameters: Sequence[tuple[str, torch.nn.Parameter]], published: PublishedValues) -> Swapped:
    swapped = []
    for name, parameter in parameters:
        swapped.append((parameter, parameter.data))
        parameter.data = published(name)
    return swapped


def _restore(swapped: Swapped) -> None:
    for parameter, original in swapped:
        parameter.data = original
