"""Fetches the samples of this rank by their handles and packs them as tensors.

An empty micro batch (`MicroBatch.samples == ()`) becomes a dummy of one prompt and one response token, so that every
data-parallel rank enters every collective. Its coefficients are zero, and no metric counts it.

Tokens of a response that the policy has not sampled (`loss_mask`) never reach the correction and the mismatch: those
see the sampled tokens alone, as if there were no others.

Shape legend: R response tokens of a micro batch, S sampled ones among them, B its sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.algorithm.correction import PackedLogprobs
from megatron_rl.batching.batch import MicroBatch, RankMiniBatch
from megatron_rl.batching.selection import TrainingSample
from megatron_rl.model.copies import on_device
from megatron_rl.model.packed_batch import PackedBatch, pack_batch
from rollout.types import ColumnsRef, GroupColumns, GroupId

FetchColumns = Callable[[Sequence[ColumnsRef]], Sequence[GroupColumns]]
"""Resolves handles in order: from the object store in a run, by the identity in one process."""

_DUMMY = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Which response tokens of a micro batch the policy has sampled.

    Indices are made on the host, so that to select by them does not wait for the device.
    """

    positions: torch.Tensor
    """[S] int64, among the response tokens."""
    sequences: torch.Tensor
    """[C] int64, the sequences that have a sampled token."""
    lengths: torch.Tensor
    """[C] int64, their sampled tokens; sums to S."""

    @classmethod
    def of(cls, loss_mask: torch.Tensor, lengths: Sequence[int]) -> "SampledTokens":
        """From the mask [R], on the CPU, and the response tokens of each sequence."""
        counts = torch.tensor([int(part.sum()) for part in torch.split(loss_mask, list(lengths))], dtype=torch.int64)
        (sequences,) = counts.nonzero(as_tuple=True)
        (positions,) = loss_mask.nonzero(as_tuple=True)
        return cls(positions=positions, sequences=sequences, lengths=counts[sequences])

    def to(self, device: torch.device) -> "SampledTokens":
        """The same on a device."""
        return SampledTokens(
            positions=on_device(self.positions, device),
            sequences=on_device(self.sequences, device),
            lengths=on_device(self.lengths, device),
        )

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the sampled tokens: [R] to [S]."""
        return values.index_select(0, self.positions)

    def place(self, values: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Values of the sampled tokens among all tokens, [S] to [R], with zeros elsewhere."""
        return values.new_zeros(num_tokens).index_copy(0, self.positions, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMicroBatch:
    """One micro batch on this rank's device."""

    packed: PackedBatch
    rollout_logprobs: torch.Tensor
    """[R] float32; empty for a dummy."""
    advantages: torch.Tensor
    """[R] float32, of the controller; empty for a dummy."""
    loss_mask: torch.Tensor
    """[R] bool, which tokens the policy has sampled; empty for a dummy."""
    sampled: SampledTokens
    """The same tokens by index."""
    rewards: torch.Tensor
    """[B] float32, shaped; empty for a dummy."""
    lengths: torch.Tensor
    """[B] int64; empty for a dummy."""
    staleness: torch.Tensor
    """[B] int64, policy versions; empty for a dummy."""

    @property
    def is_dummy(self) -> bool:
        """Whether the micro batch only keeps collectives matched."""
        return len(self.lengths) == 0

    def against(self, old_logprobs: torch.Tensor) -> PackedLogprobs:
        """Log-probabilities of sampler and trainer together, of sampled tokens alone; `old_logprobs` are [R]."""
        return PackedLogprobs(
            old_logprobs=self.sampled.select(old_logprobs),
            rollout_logprobs=self.sampled.select(self.rollout_logprobs),
            lengths=self.sampled.lengths,
        )

    def real(self, values: torch.Tensor) -> torch.Tensor:
        """Scores of the micro batch, [R], without the score of a dummy token."""
        return values[:0] if self.is_dummy else values


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMiniBatch:
    """This rank's part of one optimizer step."""

    micro_batches: tuple[LoadedMicroBatch, ...]
    num_tokens: int
    """Sampled tokens over all ranks."""
    num_sequences: int
    """Sequences with a sampled token over all ranks."""


def load_mini_batch(
    batch: RankMiniBatch, fetch: FetchColumns, *, multiple_of: int, device: torch.device
) -> LoadedMiniBatch:
    """Fetch and pack the micro batches of this rank."""
    micro_batches = batch.micro_batches
    refs = {_part_of(sample): sample.columns for micro in micro_batches for sample in micro.samples}
    columns = dict(zip(refs, fetch(list(refs.values())), strict=True))
    return LoadedMiniBatch(
        micro_batches=tuple(_load(micro, columns, multiple_of=multiple_of, device=device) for micro in micro_batches),
        num_tokens=batch.num_response_tokens,
        num_sequences=batch.num_sequences,
    )


def _part_of(sample: TrainingSample) -> tuple[GroupId, int]:
    return sample.group_id, sample.part


def _load(
    micro: MicroBatch, columns: dict[tuple[GroupId, int], GroupColumns], *, multiple_of: int, device: torch.device
) -> LoadedMicroBatch:
    parts = [columns[_part_of(sample)] for sample in micro.samples]
    pairs = [(part.prompt_ids, part.response(sample.sample)) for part, sample in zip(parts, micro.samples, strict=True)]
    rollout = [part.logprobs(sample.sample) for part, sample in zip(parts, micro.samples, strict=True)]
    advantages = [np.full(sample.num_response_tokens, sample.advantage, dtype=np.float32) for sample in micro.samples]
    lengths = [sample.num_response_tokens for sample in micro.samples]
    loss_mask = torch.ones(sum(lengths), dtype=torch.bool)  # the plan counts all response tokens as sampled, too
    return LoadedMicroBatch(
        packed=pack_batch(pairs or [(_DUMMY, _DUMMY)], multiple_of=multiple_of).to(device),
        rollout_logprobs=on_device(_joined(rollout), device),
        advantages=on_device(_joined(advantages), device),
        loss_mask=on_device(loss_mask, device),
        sampled=SampledTokens.of(loss_mask, lengths).to(device),
        rewards=on_device(torch.tensor([sample.reward for sample in micro.samples], dtype=torch.float32), device),
        lengths=on_device(torch.tensor(lengths, dtype=torch.int64), device),
        staleness=on_device(torch.tensor([sample.staleness for sample in micro.samples], dtype=torch.int64), device),
    )


def _joined(parts: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)
