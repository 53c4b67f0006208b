"""Offloads the state of a trainer rank to host memory and back, so that an engine can use the device.

A tensor keeps its identity: its storage is resized to zero bytes and later filled again, so views, optimizer states and
gradient hooks stay valid. A storage is moved once, however many tensors view it. Megatron's parameters and gradients
are views of a few large buffers.

For FP8 parameters, codes and scales in both orientations are moved. FP8 copies of BF16 weights are dropped.

Invariants: offloaded tensors are not used (kernels fail on an empty storage). Restored tensors are bitwise equal.
Gradients are not copied, because they are zero between steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_rl.model.fp8_compute import drop_copies
from megatron_rl.quantization.fp8_parameters import buffers
from megatron_rl.trainer.optimizer import LearnedModel

Part = Literal["weights", "gradients", "optimizer"]
"""Parts of the state that move separately. `weights` are the policy's, which a publish needs; weights of other models
move with `optimizer`."""


@dataclass(slots=True)
class _Away:
    """An emptied storage."""

    storage: torch.UntypedStorage
    num_bytes: int
    host: torch.Tensor | None
    """Copy of its bytes; None if zeros replace them."""


class Offloader:
    """The parts of one trainer rank, each on its device or in host memory."""

    def __init__(
        self, policy: LearnedModel, critic: LearnedModel | None = None, frozen: Sequence[torch.nn.Module] = ()
    ) -> None:
        """`frozen` are models that do not learn. No publish needs their weights and the critic's: see `Part`."""
        self._chunks = list(policy.chunks)
        self._learned = [policy] if critic is None else [policy, critic]
        self._others = [*(() if critic is None else critic.chunks), *frozen]
        self._away: dict[Part, list[_Away]] = {}

    def offload(self, parts: Iterable[Part]) -> int:
        """Offload these parts unless they are offloaded already; returns the bytes freed on the device."""
        return sum(self._offload(part) for part in parts if part not in self._away)

    def _offload(self, part: Part) -> int:
        away = []
        holders = {"weights": self._chunks, "optimizer": self._others}.get(part, ())
        dropped = sum(drop_copies(holder) for holder in holders)
        for storage in storages(self._tensors(part)):
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            host = None
            if part != "gradients":
                host = torch.empty(content.numel(), dtype=torch.uint8, pin_memory=content.is_cuda)
                host.copy_(content)
            away.append(_Away(storage, storage.nbytes(), host))
            del content
            storage.resize_(0)
        self._away[part] = away
        return dropped + sum(emptied.num_bytes for emptied in away)

    def onload(self) -> None:
        """Restore all offloaded parts."""
        for away in self._away.values():
            for emptied in away:
                emptied.storage.resize_(emptied.num_bytes)
                content = torch.empty(0, dtype=torch.uint8, device=emptied.storage.device).set_(emptied.storage)  # type: ignore[call-overload]
                content.zero_() if emptied.host is None else content.copy_(emptied.host)
        self._away = {}

    def _tensors(self, part: Part) -> Iterator[torch.Tensor]:
        match part:
            case "weights":
                yield from _weights(self._chunks)
            case "gradients":
                for chunk in (chunk for model in self._learned for chunk in model.chunks):
                    yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
            case "optimizer":
                weights = {storage.data_ptr() for storage in storages(_weights(self._chunks))}
                for tensor in chain(_weights(self._others), self._optimizer_tensors()):
                    if tensor.untyped_storage().data_ptr() not in weights:
                        yield tensor

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """FP32 masters and Adam's moments."""
        for optimizer in (part for model in self._learned for part in _parts(model.optimizer)):
            for group in optimizer.optimizer.param_groups:
                yield from (parameter.data for parameter in group["params"])
            for state in optimizer.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _weights(holders: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for holder in holders:
        for parameter in holder.parameters():
            yield from buffers(parameter)


def _parts(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers of a chain: of dense parameters and of experts."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Distinct storages that are not empty."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]
