"""One step of policy learning on one trainer rank: old log-probabilities, correction, optimizer steps.

SPMD: all ranks call every method together with the same `TrainBatch`. Scores exist on the last pipeline stage only,
so weights, losses and metrics are computed there. The other stages run the same schedules and keep nothing.

If a training step has a single optimizer step, `old_logprobs` are the forward's own `logprobs.detach()`, and no second
forward is needed. Otherwise one forward over all samples comes first, because the proximal policy is the policy before
the first mini batch. Batch normalisation and means over kept tokens need that forward too.

The schedule of the learning rate advances by the configured number of optimizer steps in every training step. Groups
that were dropped and updates that were skipped do not stretch it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.algorithm.correction import (
    PackedLogprobs,
    correction_weights,
    counted_tokens,
    final_weights,
    normalization_sums,
    sequence_sum,
)
from megatron_rl.algorithm.loss import (
    Denominators,
    LossInputs,
    LossOutput,
    LossSettings,
    coefficients,
    load_loss,
    sft_loss,
)
from megatron_rl.algorithm.mismatch import MismatchSums, SumsByAge
from megatron_rl.batching.batch import RankBatch
from megatron_rl.batching.cost_model import MeasuredTimes
from megatron_rl.config import AlgorithmConfig
from megatron_rl.model.logprobs import TokenScores
from megatron_rl.model.packed_batch import PackedBatch
from megatron_rl.trainer.loaded_batch import FetchColumns, LoadedMicroBatch, LoadedMiniBatch, load_mini_batch
from megatron_rl.trainer.optimizer import gradients_are_finite
from megatron_rl.trainer.pipeline import MicroBatchClock, OnScores, run_schedule
from megatron_rl.trainer.results import StepResult
from rollout import progress


@dataclass(slots=True)
class _StepSums:
    """Sums of a step on this rank."""

    mismatch: MismatchSums
    by_age: SumsByAge
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Float64 scalars; like the others they stay on the device, because reading one would wait for it."""
    grad_norms: list[float] = field(default_factory=list)
    updates: int = 0
    skipped: int = 0

    def add(self, metrics: dict[str, torch.Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.double()

    def count(self, grad_norm: float | None) -> None:
        if grad_norm is None:
            self.skipped += 1
        else:
            self.updates += 1
            self.grad_norms.append(grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corrected:
    """Of one micro batch, [R] each; empty for a dummy."""

    old_logprobs: torch.Tensor
    weights: torch.Tensor
    counted: torch.Tensor
    """Whether the loss's denominators count a token."""


class Learner:
    """Model, optimizer and algorithm on one rank."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
        *,
        algorithm: AlgorithmConfig,
        temperature: float,
        max_response_tokens: int,
        row_multiple: int,
        device: torch.device,
    ) -> None:
        """`temperature` and `max_response_tokens` are the sampler's; packed rows are padded to a multiple of
        `row_multiple`.
        """
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.schedule = schedule
        self._algorithm = algorithm
        self._temperature = temperature
        self._max_response_tokens = max_response_tokens
        self._row_multiple = row_multiple
        self._device = device
        self._loss = load_loss(algorithm.loss)
        self._loss_settings = LossSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            entropy_bonus=algorithm.entropy_bonus,
        )
        self._is_last = parallel_state.is_pipeline_last_stage()
        self._has_pipeline = parallel_state.get_pipeline_model_parallel_world_size() > 1
        self._times = MeasuredTimes()
        """Times of this rank's micro batches since it started. They are reported and influence no decision."""
        self._is_warm = False
        """True after the first optimizer step, which includes one-time work (allocations, choice of kernels)."""

    def train(self, batch: RankBatch, fetch: FetchColumns) -> StepResult:
        """Train on the batch of one step. Metrics are complete on the last pipeline stage only."""
        algorithm = self._algorithm
        totals = self._no_sums(batch.max_staleness)
        progress.mark("responses")
        mini_batches = [
            load_mini_batch(mini, fetch, multiple_of=self._row_multiple, device=self._device)
            for mini in batch.mini_batches
        ]
        if len(mini_batches) == algorithm.num_epochs == 1 and not self._loss_needs_all_logprobs:
            self._update(mini_batches[0], self._planned_denominators(mini_batches[0]), totals)
        elif mini_batches:
            corrected = self._corrected(mini_batches, totals)
            for _ in range(algorithm.num_epochs):
                for mini, (denominators, micro_batches) in zip(mini_batches, corrected, strict=True):
                    self._update(mini, denominators, totals, micro_batches)
        self._finish_schedule(totals.updates)
        return self._result(totals)

    def _no_sums(self, max_staleness: int) -> _StepSums:
        return _StepSums(
            MismatchSums.empty(config=self._algorithm.correction, device=self._device),
            SumsByAge.empty(max_staleness, self._device),
        )

    @property
    def _loss_needs_all_logprobs(self) -> bool:
        """Whether weights or denominators are sums over the whole step."""
        correction = self._algorithm.correction
        return correction.batch_normalize or correction.counts_kept_tokens

    def _finish_schedule(self, num_updates: int) -> None:
        """Advance the schedule by the configured optimizer steps that this training step did not make."""
        configured = self._algorithm.num_epochs * self._algorithm.num_mini_batches
        if (missing := configured - num_updates) > 0:
            self.schedule.step(increment=missing)

    def logprobs(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities of every micro batch's responses, [R] each, without gradients; last stage only."""

        def keep(number: int, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor]:
            del number
            return scores.logprobs.sum() * 0.0, scores.logprobs.detach()

        packed = [micro.packed for micro in micro_batches]
        return run_schedule(self.chunks, packed, keep, temperature=self._temperature, backward=False)

    def _corrected(
        self, mini_batches: Sequence[LoadedMiniBatch], totals: _StepSums
    ) -> list[tuple[Denominators, list[_Corrected]]]:
        """Denominators and corrected micro batches of each mini batch, and the step's mismatch.

        Runs a forward over all samples. Before the last stage there are no corrected micro batches.
        """
        old = [self.logprobs(mini.micro_batches) for mini in mini_batches]
        if not self._is_last:
            return [(self._planned_denominators(mini), []) for mini in mini_batches]
        pairs = [
            [
                (micro, micro.against(_real(micro, logprobs)))
                for micro, logprobs in zip(mini.micro_batches, of_mini, strict=True)
            ]
            for mini, of_mini in zip(mini_batches, old, strict=True)
        ]
        sums = self._normalization([pair for of_mini in pairs for _, pair in of_mini])
        corrected = [[self._correct(micro, pair, totals, sums) for micro, pair in of_mini] for of_mini in pairs]
        return list(zip(self._denominators(mini_batches, corrected), corrected, strict=True))

    def _planned_denominators(self, mini: LoadedMiniBatch) -> Denominators:
        return Denominators(
            num_tokens=mini.num_tokens,
            num_sequences=mini.num_sequences,
            max_response_tokens=self._max_response_tokens,
        )

    def _denominators(
        self, mini_batches: Sequence[LoadedMiniBatch], corrected: Sequence[Sequence[_Corrected]]
    ) -> list[Denominators]:
        """What each mini batch counts over data-parallel ranks; last stage only."""
        if not self._algorithm.correction.counts_kept_tokens:
            return [self._planned_denominators(mini) for mini in mini_batches]
        counts = torch.zeros(len(corrected), 2, dtype=torch.int64, device=self._device)
        for row, (mini, of_mini) in enumerate(zip(mini_batches, corrected, strict=True)):
            for micro, each in zip(mini.micro_batches, of_mini, strict=True):
                in_sequence = sequence_sum(each.counted.float(), micro.lengths)
                counts[row] += torch.stack([each.counted.sum(), (in_sequence > 0).sum()])
        dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        return [
            Denominators(num_tokens=tokens, num_sequences=sequences, max_response_tokens=self._max_response_tokens)
            for tokens, sequences in counts.tolist()
        ]

    def _normalization(self, pairs: Sequence[PackedLogprobs]) -> torch.Tensor | None:
        """Sum and count of the step's weights over data-parallel ranks; None without batch normalisation."""
        config = self._algorithm.correction
        if not config.batch_normalize:
            return None
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for pair in pairs:
            sums += normalization_sums(correction_weights(pair, config=config), pair.lengths, config=config)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        return sums

    def _correct(
        self, micro: LoadedMicroBatch, pair: PackedLogprobs, totals: _StepSums, sums: torch.Tensor | None
    ) -> _Corrected:
        config = self._algorithm.correction
        totals.mismatch = totals.mismatch.merge(MismatchSums.of(pair, config=config))
        weights = final_weights(pair, config=config, sums=sums)
        totals.by_age.add(pair, weights, micro.staleness)
        counted = counted_tokens(pair, config=config)
        return _Corrected(old_logprobs=pair.old_logprobs, weights=weights, counted=counted)

    def _update(
        self,
        mini: LoadedMiniBatch,
        denominators: Denominators,
        totals: _StepSums,
        corrected: Sequence[_Corrected] | None = None,
    ) -> None:
        """One optimizer step. Without `corrected`, the forward's own log-probabilities are the old ones."""

        def loss(number: int, scores: TokenScores) -> tuple[torch.Tensor, LossOutput]:
            micro = mini.micro_batches[number]
            logprobs = _real(micro, scores.logprobs)
            correction = (
                self._correct(micro, micro.against(logprobs.detach()), totals, None)
                if corrected is None
                else corrected[number]
            )
            shares = coefficients(
                micro.lengths,
                correction.counted,
                aggregation=self._algorithm.aggregation,
                denominators=denominators,
            )
            entropy = _real(micro, scores.entropy)
            inputs = LossInputs(
                logprobs=logprobs,
                entropy=entropy if self._algorithm.entropy_bonus else entropy.detach(),
                old_logprobs=correction.old_logprobs,
                advantages=micro.advantages,
                weights=correction.weights,
                coefficients=shares,
                lengths=micro.lengths,
                num_tokens=mini.num_tokens,
            )
            output = self._loss(inputs, self._loss_settings)
            return output.loss, output

        packed = [micro.packed for micro in mini.micro_batches]
        outputs, grad_norm = self._optimizer_step(packed, loss, temperature=self._temperature)
        for output in outputs:
            totals.add(output.metrics)
        totals.count(grad_norm)

    def sft_step(self, packed: Sequence[PackedBatch], is_dummy: Sequence[bool], num_tokens: int) -> StepResult:
        """One optimizer step of SFT: mean negative log-probability over `num_tokens`, at temperature 1."""

        def loss(number: int, scores: TokenScores) -> tuple[torch.Tensor, LossOutput]:
            share = torch.full_like(scores.logprobs, 0.0 if is_dummy[number] else 1.0 / num_tokens)
            output = sft_loss(scores.logprobs, coefficients=share)
            return output.loss, output

        totals = self._no_sums(0)
        outputs, grad_norm = self._optimizer_step(packed, loss, temperature=1.0)
        for output in outputs:
            totals.add(output.metrics)
        totals.count(grad_norm)
        return self._result(totals)

    def _optimizer_step(
        self, packed: Sequence[PackedBatch], loss: OnScores[LossOutput], *, temperature: float
    ) -> tuple[list[LossOutput], float | None]:
        """Forward, backward, clip, step. If any gradient is not finite, the update is skipped and the norm is None."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        clock = MicroBatchClock(self._device) if self._is_warm and not self._has_pipeline else None
        outputs = run_schedule(self.chunks, packed, loss, temperature=temperature, backward=True, clock=clock)
        progress.mark("gradients")
        if clock is not None:
            for batch, seconds in zip(packed, clock.seconds(), strict=False):  # the last micro batch is not timed
                self._times.add(np.diff(batch.cu_seqlens.cpu().numpy()), seconds)
        self._is_warm = True
        if not gradients_are_finite(self.chunks):
            return outputs, None
        self.schedule.step(increment=1)
        progress.mark("optimizer step")
        _, grad_norm, _ = self.optimizer.step()
        return outputs, float(grad_norm)

    def _result(self, totals: _StepSums) -> StepResult:
        attempts = totals.updates + totals.skipped
        metrics = {"actor/lr": float(self.optimizer.param_groups[0]["lr"])} | self._measured()
        if totals.grad_norms:
            metrics["actor/grad_norm"] = sum(totals.grad_norms) / len(totals.grad_norms)
        if self._is_last and attempts:
            metrics |= self._reduced(totals, attempts)
        return StepResult(metrics=metrics, num_optimizer_steps=totals.updates, num_skipped_updates=totals.skipped)

    def _measured(self) -> dict[str, float]:
        """Measured micro-batch costs on this rank; empty in a pipeline and until a fit is possible."""
        costs = self._times.fit()
        if costs is None:
            return {}
        return {
            "perf/attention_parity_tokens": costs.parity_tokens,
            "perf/train_seconds_per_mtoken": costs.seconds_per_token * 1e6,
            "perf/micro_batch_overhead_s": costs.overhead_s,
        }

    def _reduced(self, totals: _StepSums, attempts: int) -> dict[str, float]:
        """Metrics of the step over data-parallel ranks. Loss metrics are means over its optimizer steps."""
        progress.mark("metrics")
        group = parallel_state.get_data_parallel_group()
        names = sorted(totals.sums)
        losses = torch.stack([totals.sums[name] for name in names])
        summed, maximised = totals.mismatch.vectors()
        by_age = totals.by_age.sums
        sums = torch.cat([losses, by_age.flatten(), summed])
        dist.all_reduce(sums, group=group)
        dist.all_reduce(maximised, op=dist.ReduceOp.MAX, group=group)
        sums, maximised = sums.cpu(), maximised.cpu()
        ages_end = len(names) + by_age.numel()
        mismatch = totals.mismatch.from_vectors(sums[ages_end:], maximised)
        by_age = sums[len(names) : ages_end].reshape(by_age.shape)
        metrics = {name: float(value) / attempts for name, value in zip(names, sums, strict=False)}
        return metrics | mismatch.finalize() | SumsByAge(by_age).metrics()


def _real(micro: LoadedMicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Scores of a micro batch, without the score of a dummy token."""
    return values[:0] if micro.is_dummy else values
