"""Fetches the samples of this rank by their handles and packs them as tensors.

An empty micro batch (`MicroBatch.samples == ()`) becomes a dummy of one prompt and one response token, so that every
data-parallel rank enters every collective. Its coefficients are zero, and no metric counts it.

Shape legend: R response tokens of a micro batch, B its sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.algorithm.correction import PackedLogprobs
from megatron_rl.batching.batch import MicroBatch, RankMiniBatch
from megatron_rl.model.packed_batch import PackedBatch, pack_batch
from rollout.types import ColumnsRef, GroupColumns, GroupId

FetchColumns = Callable[[Sequence[ColumnsRef]], Sequence[GroupColumns]]
"""Resolves handles in order: from the object store in a run, by the identity in one process."""

_DUMMY = np.zeros(1, dtype=np.int32)


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
        """Log-probabilities of sampler and trainer together."""
        return PackedLogprobs(old_logprobs=old_logprobs, rollout_logprobs=self.rollout_logprobs, lengths=self.lengths)

    def real(self, values: torch.Tensor) -> torch.Tensor:
        """Scores of the micro batch, [R], without the score of a dummy token."""
        return values[:0] if self.is_dummy else values


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMiniBatch:
    """This rank's part of one optimizer step."""

    micro_batches: tuple[LoadedMicroBatch, ...]
    num_tokens: int
    """Response tokens over all ranks."""
    num_sequences: int
    """Sequences over all ranks."""


def load_mini_batch(
    batch: RankMiniBatch, fetch: FetchColumns, *, multiple_of: int, device: torch.device
) -> LoadedMiniBatch:
    """Fetch and pack the micro batches of this rank."""
    micro_batches = batch.micro_batches
    refs = {sample.group_id: sample.columns for micro in micro_batches for sample in micro.samples}
    columns = dict(zip(refs, fetch(list(refs.values())), strict=True))
    return LoadedMiniBatch(
        micro_batches=tuple(_load(micro, columns, multiple_of=multiple_of, device=device) for micro in micro_batches),
        num_tokens=batch.num_response_tokens,
        num_sequences=batch.num_sequences,
    )


def _load(
    micro: MicroBatch, columns: dict[GroupId, GroupColumns], *, multiple_of: int, device: torch.device
) -> LoadedMicroBatch:
    groups = [columns[sample.group_id] for sample in micro.samples]
    pairs = [
        (group.prompt_ids, group.response(sample.sample)) for group, sample in zip(groups, micro.samples, strict=True)
    ]
    rollout = [group.logprobs(sample.sample) for group, sample in zip(groups, micro.samples, strict=True)]
    advantages = [np.full(sample.num_response_tokens, sample.advantage, dtype=np.float32) for sample in micro.samples]
    lengths = [sample.num_response_tokens for sample in micro.samples]
    return LoadedMicroBatch(
        packed=pack_batch(pairs or [(_DUMMY, _DUMMY)], multiple_of=multiple_of).to(device),
        rollout_logprobs=_joined(rollout).to(device),
        advantages=_joined(advantages).to(device),
        loss_mask=torch.ones(sum(lengths), dtype=torch.bool, device=device),
        rewards=torch.tensor([sample.reward for sample in micro.samples], dtype=torch.float32, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int64, device=device),
        staleness=torch.tensor([sample.staleness for sample in micro.samples], dtype=torch.int64, device=device),
    )


def _joined(parts: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)
