"""Log-probabilities of the reference policy: a copy of the policy's weights from the start of the run, or a later one.

`HostReference` keeps the copy in host memory. For the forwards of a step, copy and policy change places: block by
block, the reference's bytes go into the policy's memory and the policy's bytes into the host's. So neither device nor
host ever holds a third copy, and one exchange serves all micro batches (the probe's way, layer by layer during the
forward, would copy the model once for each). The exchange moves raw bytes of whole storages, so both come back bitwise.

`DeviceReference` is a second model on the device, without gradients and optimizer.

SPMD: all ranks call every method together. Log-probabilities exist on the last pipeline stage only.

Invariants: they equal those of a model that was loaded with the same weights, and the policy is bitwise the same
afterwards (tests/megatron_rl/trainer/test_reference.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from megatron_rl.model.build import PolicyModel
from megatron_rl.model.fp8_compute import drop_copies
from megatron_rl.model.packed_batch import PackedBatch
from megatron_rl.quantization.fp8_parameters import buffers
from megatron_rl.trainer.loaded_batch import LoadedMicroBatch
from megatron_rl.trainer.offload import bytes_of, storages
from megatron_rl.trainer.pipeline import forward_logprobs

BLOCK_BYTES = 64 << 20
"""Bytes that are exchanged at a time: what the exchange needs on the device."""

NamedTensors = dict[str, torch.Tensor]


class Reference(Protocol):
    """The reference policy on one trainer rank."""

    def logprobs(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities of the responses of every micro batch, [R] each, one for a dummy."""
        ...

    def refresh(self) -> None:
        """Take the policy's present weights as the reference."""
        ...

    @property
    def models(self) -> Sequence[PolicyModel]:
        """Models on the device that hold nothing but the reference."""
        ...

    def weights(self) -> NamedTensors:
        """The reference's tensors by the names of the policy's parameters, in place: writing changes the reference."""
        ...


class HostReference:
    """Reference weights in host memory."""

    def __init__(self, chunks: Sequence[torch.nn.Module], *, temperature: float) -> None:
        """Copy the present weights of `chunks`, wrapped by Megatron's DDP; `temperature` is the sampler's."""
        self._chunks = list(chunks)
        self._temperature = temperature
        self._live = storages(held for chunk in chunks for p in chunk.parameters() for held in buffers(p))
        self._host = [
            torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            for storage in self._live
        ]
        self.refresh()

    def logprobs(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Exchange weights, run the forwards, and exchange them back."""
        with self._in_place():
            return forward_logprobs(self._chunks, _packed(micro_batches), temperature=self._temperature)

    def refresh(self) -> None:
        """Copy the policy's present weights."""
        for storage, host in zip(self._live, self._host, strict=True):
            host.copy_(bytes_of(storage))

    @property
    def models(self) -> Sequence[PolicyModel]:
        """None: only the host holds the reference."""
        return ()

    def weights(self) -> NamedTensors:
        """Views of the host's memory."""
        host_of = {storage.data_ptr(): host for storage, host in zip(self._live, self._host, strict=True)}
        found: NamedTensors = {}
        for name, parameter in _parameters(self._chunks):
            tensor = parameter.detach()
            host = host_of[tensor.untyped_storage().data_ptr()].untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype)
            found[name] = view.set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
        return found

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for storage, host in zip(self._live, self._host, strict=True):
            _exchange(bytes_of(storage), host)
        for chunk in self._chunks:
            drop_copies(chunk)  # FP8 copies of the other weights
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


class DeviceReference:
    """A second model on the device."""

    def __init__(self, models: Sequence[PolicyModel], policy: Sequence[torch.nn.Module], *, temperature: float) -> None:
        """`models` hold the reference's weights; `policy` are the chunks that `refresh` copies."""
        self._models = tuple(models)
        for model in models:
            model.requires_grad_(False)
        self._policy = list(policy)
        self._temperature = temperature

    def logprobs(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Run the forwards of the second model."""
        return forward_logprobs(self._models, _packed(micro_batches), temperature=self._temperature)

    def refresh(self) -> None:
        """Copy the policy's present weights; FP8 parameters by their codes and scales."""
        own = (p for model in self._models for p in model.parameters())
        policy = (p for chunk in self._policy for p in chunk.parameters())
        for mine, theirs in zip(own, policy, strict=True):
            for target, source in zip(buffers(mine), buffers(theirs), strict=True):
                target.copy_(source)
        for model in self._models:
            drop_copies(model)

    @property
    def models(self) -> Sequence[PolicyModel]:
        """The second model."""
        return self._models

    def weights(self) -> NamedTensors:
        """The model's own tensors."""
        return {name: p.detach() for model in self._models for name, p in model.named_parameters()}


def _parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of wrapped chunks by their names inside the model."""
    for chunk in chunks:
        yield from chunk.module.named_parameters()  # type: ignore[union-attr, operator]


def _packed(micro_batches: Sequence[LoadedMicroBatch]) -> list[PackedBatch]:
    return [micro.packed for micro in micro_batches]


def _exchange(device: torch.Tensor, host: torch.Tensor) -> None:
    """Exchange the bytes of two tensors. Copies of one stream keep their order, so nothing waits."""
    for begin in range(0, device.numel(), BLOCK_BYTES):
        block, other = device[begin : begin + BLOCK_BYTES], host[begin : begin + BLOCK_BYTES]
        kept = block.clone()
        block.copy_(other, non_blocking=True)
        other.copy_(kept, non_blocking=True)
