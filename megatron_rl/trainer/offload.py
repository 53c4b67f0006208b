"""Offloads the state of a trainer rank to host memory and back: for an engine on the device, or for a backward pass.

A tensor keeps its identity: its storage is resized to zero bytes and later filled again, so views, optimizer states and
gradient hooks stay valid. A storage is moved once, however many tensors view it. Megatron's parameters and gradients
are views of a few large buffers.

`Offloader` moves parts of the state between phases of a step, and `HostedStates` an optimizer's around each update.

For FP8 parameters, codes and scales in both orientations are moved. FP8 copies of BF16 weights are dropped.

Invariants: offloaded tensors are not used (kernels fail on an empty storage). Restored tensors are bitwise equal.
Gradients are not copied, because they are zero between steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_rl.model.fp8_compute import drop_copies
from megatron_rl.quantization.fp8_parameters import buffers

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


def _empty(full: Iterable[torch.UntypedStorage], away: list[_Away], *, copied: bool) -> None:
    """Free these storages, after a copy of each to host memory if `copied`; `away` gets them one by one.

    If host memory ends, `away` has all that are freed, so that `_fill` restores them.
    """
    for storage in full:
        content = bytes_of(storage)
        host = None
        if copied:
            host = torch.empty(content.numel(), dtype=torch.uint8, pin_memory=content.is_cuda)
            host.copy_(content)
        away.append(_Away(storage, storage.nbytes(), host))
        del content
        storage.resize_(0)


def _fill(away: Iterable[_Away]) -> None:
    """Give emptied storages their bytes again."""
    for emptied in away:
        emptied.storage.resize_(emptied.num_bytes)
        content = bytes_of(emptied.storage)
        content.zero_() if emptied.host is None else content.copy_(emptied.host)


class HostedStates:
    """Masters and moments of one optimizer that stay in host memory, and are on the device for an update only."""

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
        """`chunks` hold the weights that the optimizer updates. In FP32 they are the masters, so they do not move."""
        self._chunks = chunks
        self._optimizer = optimizer
        self._away: list[_Away] = []

    def to_host(self) -> None:
        """Free the states on the device. Weights must be there; states that are away already stay away.

        torch gives the memory back to the device, where engines may need it.
        """
        states = _without(_optimizer_tensors(self._optimizer), _weights(self._chunks))
        full = storages(states)
        are_on_gpu = any(storage.device.type == "cuda" for storage in full)
        _empty(full, self._away, copied=True)
        if are_on_gpu:
            torch.cuda.empty_cache()

    def to_device(self) -> None:
        """Bring all states back."""
        _fill(self._away)
        self._away = []

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which the states are on the device, for an update or a load."""
        self.to_device()
        try:
            yield
        finally:
            self.to_host()


class Learned(Protocol):
    """What is offloaded of a `LearnedModel`."""

    @property
    def chunks(self) -> Sequence[DistributedDataParallel]:
        """With Megatron's gradient buffers."""

    @property
    def optimizer(self) -> MegatronOptimizer:
        """Over the weights of the chunks."""


class Offloader:
    """The parts of one trainer rank, each on its device or in host memory."""

    def __init__(self, policy: Learned, critic: Learned | None = None, frozen: Sequence[torch.nn.Module] = ()) -> None:
        """`frozen` are models that do not learn. No publish needs their weights and the critic's: see `Part`."""
        self._chunks = list(policy.chunks)
        self._learned = [policy] if critic is None else [policy, critic]
        self._others = [*(() if critic is None else critic.chunks), *frozen]
        self._away: dict[Part, list[_Away]] = {}

    def offload(self, parts: Iterable[Part]) -> int:
        """Offload these parts unless they are offloaded already; returns the bytes freed on the device."""
        return sum(self._offload(part) for part in parts if part not in self._away)

    def _offload(self, part: Part) -> int:
        holders = {"weights": self._chunks, "optimizer": self._others}.get(part, ())
        dropped = sum(drop_copies(holder) for holder in holders)
        away = self._away[part] = []
        _empty(storages(self._tensors(part)), away, copied=part != "gradients")
        return dropped + sum(emptied.num_bytes for emptied in self._away[part])

    def onload(self) -> None:
        """Restore all offloaded parts."""
        for away in self._away.values():
            _fill(away)
        self._away = {}

    def _tensors(self, part: Part) -> Iterator[torch.Tensor]:
        match part:
            case "weights":
                yield from _weights(self._chunks)
            case "gradients":
                for chunk in (chunk for model in self._learned for chunk in model.chunks):
                    yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
            case "optimizer":
                states = (_optimizer_tensors(model.optimizer) for model in self._learned)
                yield from _without(chain(_weights(self._others), *states), _weights(self._chunks))


def _without(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that share no storage with others."""
    kept = {storage.data_ptr() for storage in storages(others)}
    return (tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in kept)


def _optimizer_tensors(whole: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """FP32 masters and Adam's moments."""
    for part in _parts(whole):
        for group in part.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in part.optimizer.state.values():
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


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage as a tensor [N], uint8, on its device."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage)  # type: ignore[call-overload, no-any-return]
