"""Scores a sample of a step's responses twice, to split the mismatch into its causes (`algorithm.mismatch_parts`).

The sample is scored with the trainer's own weights and with the published ones, before the first update of the step,
while the last publish holds this trainer's weights. Two forwards of the sample are the whole cost; the second quantises
the weights once more for each micro batch, layer by layer.

Each rank draws whole responses of its own part of the batch, in an order that is a hash of the step, until they have
`limit_tokens` prompt and response tokens. So a sample exceeds that by less than one response. No response is left out
for its own length, so over many steps long ones have their share of the tokens.

All ranks forward equally many micro batches, so that collectives match; those without responses hold a dummy token.
"""

import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.algorithm.mismatch_parts import PartSums, SampledTokens
from megatron_rl.batching.batch import MicroBatch, RankBatch, RankMiniBatch
from megatron_rl.batching.selection import TrainingSample
from megatron_rl.trainer.loaded_batch import FetchColumns, LoadedMicroBatch, load_mini_batch
from megatron_rl.trainer.pipeline import forward_logprobs
from megatron_rl.trainer.probe import PublishedValues, published_weights
from rollout import progress


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSample:
    """Measures the parts of the mismatch on one rank."""

    chunks: Sequence[DistributedDataParallel]
    limit_tokens: int
    """Tokens of a rank's sample."""
    max_micro_batch_tokens: int
    temperature: float
    """Of the sampler."""
    row_multiple: int
    device: torch.device
    ages_by_token: bool
    """Whether a response that continues under new weights has keys and values of them (`publish.in_flight`). If not,
    all its tokens are as old as its first one."""

    def measure(self, batch: RankBatch, fetch: FetchColumns, published: PublishedValues) -> dict[str, float]:
        """Metrics of the sample, on the last pipeline stage; all ranks call it together.

        `published` gives values of the parameters under the codes of the last publish.
        """
        started = time.perf_counter()
        progress.mark("mismatch sample")
        packed = self._as_many_on_all_ranks(
            pack(choose(batch, limit_tokens=self.limit_tokens), max_tokens=self.max_micro_batch_tokens)
        )
        loaded = load_mini_batch(
            _mini_batch(packed), fetch, multiple_of=self.row_multiple, device=self.device
        ).micro_batches
        old = self._scores(loaded, None)
        codes = self._scores(loaded, published)
        if not old:
            return {}
        sums = PartSums.empty(batch.max_staleness, self.device)
        for part, micro, of_trainer, of_codes in zip(packed, loaded, old, codes, strict=True):
            samples = part.samples
            columns = fetch([sample.columns for sample in samples])
            flags = [of.resampled_in(sample.sample) for of, sample in zip(columns, samples, strict=True)]
            ages = [token_ages(sample, batch.policy_version, by_token=self.ages_by_token) for sample in samples]
            select = micro.sampled.select
            sums.add(
                SampledTokens(
                    old_logprobs=select(micro.real(of_trainer)),
                    code_logprobs=select(micro.real(of_codes)),
                    rollout_logprobs=select(micro.rollout_logprobs),
                    ages=select(self._on_device(ages).long()),
                    resampled=select(self._on_device(flags).bool()),
                )
            )
        dist.all_reduce(sums.sums, group=parallel_state.get_data_parallel_group())
        metrics = sums.metrics()  # waits for the device
        return metrics and {**metrics, "timing_s/mismatch_sample": time.perf_counter() - started}

    def _as_many_on_all_ranks(self, packed: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro batches, with empty ones up to the most that any data-parallel rank has."""
        most = torch.tensor(len(packed), device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return [*packed, *[MicroBatch(samples=())] * (int(most) - len(packed))]

    def _scores(
        self, micro_batches: Sequence[LoadedMicroBatch], published: PublishedValues | None
    ) -> list[torch.Tensor]:
        """Log-probabilities of each micro batch's responses, [R], or of its dummy; empty before the last stage."""
        weights = nullcontext() if published is None else published_weights(self.chunks, published)
        with torch.no_grad(), weights:
            return forward_logprobs(
                self.chunks, [micro.packed for micro in micro_batches], temperature=self.temperature
            )

    def _on_device(self, parts: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts])).to(self.device)


def choose(batch: RankBatch, *, limit_tokens: int) -> list[TrainingSample]:
    """Responses of a rank's sample, in an order that changes from step to step; at least one if there is any.

    The sample ends with the response that reaches `limit_tokens`. To end before one that does not fit would leave out
    long ones.
    """
    samples = [sample for mini in batch.mini_batches for micro in mini.micro_batches for sample in micro.samples]
    chosen: list[TrainingSample] = []
    num_tokens = 0
    for sample in sorted(samples, key=lambda sample: _draw(sample, batch.policy_version)):
        if chosen and num_tokens >= limit_tokens:
            break
        chosen.append(sample)
        num_tokens += sample.num_tokens
    return chosen


def pack(samples: Sequence[TrainingSample], *, max_tokens: int) -> list[MicroBatch]:
    """Micro batches in the order of the samples, of at most `max_tokens` or one longer sample; at least one."""
    parts: list[list[TrainingSample]] = [[]]
    num_tokens = 0
    for sample in samples:
        if parts[-1] and num_tokens + sample.num_tokens > max_tokens:
            parts.append([])
            num_tokens = 0
        parts[-1].append(sample)
        num_tokens += sample.num_tokens
    return [MicroBatch(samples=tuple(part)) for part in parts]


def _draw(sample: TrainingSample, policy_version: int) -> tuple[int, int, int]:
    key = f"{policy_version}/{sample.group_id}/{sample.sample}"
    return zlib.crc32(key.encode()), sample.group_id, sample.sample


def _mini_batch(packed: Sequence[MicroBatch]) -> RankMiniBatch:
    """The micro batches with denominators that nothing reads."""
    return RankMiniBatch(
        micro_batches=tuple(packed),
        num_sequences=sum(len(micro.samples) for micro in packed),
        num_response_tokens=sum(sample.num_response_tokens for micro in packed for sample in micro.samples),
    )


def token_ages(
    sample: TrainingSample, policy_version: int, *, by_token: bool
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Policy versions between each token's weights and `policy_version`, [T]."""
    if not by_token:
        return np.full(sample.num_response_tokens, sample.staleness, dtype=np.int64)
    ages = [policy_version - span.weight_version for span in sample.weight_spans]
    return np.repeat(np.array(ages, dtype=np.int64), [span.num_tokens for span in sample.weight_spans])
