"""One step of policy learning on one trainer rank: old log-probabilities, correction, optimizer steps.

SPMD: all ranks call every method together with the same `TrainBatch`. Scores exist on the last pipeline stage only,
so weights, losses and metrics are computed there. The other stages run the same schedules and keep nothing.

If a training step has a single optimizer step, `old_logprobs` are the forward's own `logprobs.detach()`, and no second
forward is needed. Otherwise one forward over all samples comes first, because the proximal policy is the policy before
the first mini batch.
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

from megatron_rl.algorithm.correction import PackedLogprobs, correction_weights, final_weights, normalization_sums
from megatron_rl.algorithm.loss import LossInputs, LossOutput, LossSettings, coefficients, load_loss, sft_loss
from megatron_rl.algorithm.mismatch import MismatchSums, SumsByAge
from megatron_rl.batching.batch import TrainBatch
from megatron_rl.batching.cost_model import MeasuredTimes
from megatron_rl.config import AlgorithmConfig
from megatron_rl.model.logprobs import TokenScores
from megatron_rl.model.packed_batch import PackedBatch
from megatron_rl.trainer.loaded_batch import FetchColumns, LoadedMicroBatch, LoadedMiniBatch, load_mini_batch
from megatron_rl.trainer.optimizer import gradients_are_finite
from megatron_rl.trainer.pipeline import MicroBatchClock, OnScores, run_schedule
from megatron_rl.trainer.results import StepResult


@dataclass(slots=True)
class _StepSums:
    """Sums of a step on this rank."""

    mismatch: MismatchSums
    by_age: SumsByAge
    sums: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    updates: int = 0
    skipped: int = 0

    def add(self, metrics: dict[str, torch.Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def count(self, grad_norm: float | None) -> None:
        if grad_norm is None:
            self.skipped += 1
        else:
            self.updates += 1
            self.grad_norms.append(grad_norm)


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
        data_rank: int,
        row_multiple: int,
        device: torch.device,
    ) -> None:
        """`temperature` is the sampler's; packed rows are padded to a multiple of `row_multiple`."""
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.schedule = schedule
        self._algorithm = algorithm
        self._temperature = temperature
        self._data_rank = data_rank
        self._row_multiple = row_multiple
        self._device = device
        self._loss = load_loss(algorithm.loss)
        self._is_last = parallel_state.is_pipeline_last_stage()
        self._has_pipeline = parallel_state.get_pipeline_model_parallel_world_size() > 1
        self._times = MeasuredTimes()
        """Times of this rank's micro batches since it started. They are reported and influence no decision."""
        self._is_warm = False
        """True after the first optimizer step, which includes one-time work (allocations, choice of kernels)."""

    def train(self, batch: TrainBatch, fetch: FetchColumns) -> StepResult:
        """Train on the batch of one step. Metrics are complete on the last pipeline stage only."""
        algorithm = self._algorithm
        totals = _StepSums(MismatchSums.empty(config=algorithm.correction), SumsByAge.empty(batch.counts.max_staleness))
        if not batch.mini_batches:
            return self._result(totals)
        mini_batches = [
            load_mini_batch(mini, self._data_rank, fetch, multiple_of=self._row_multiple, device=self._device)
            for mini in batch.mini_batches
        ]
        one_update = len(mini_batches) == 1 and algorithm.num_epochs == 1 and not algorithm.correction.batch_normalize
        if one_update:
            self._update(mini_batches[0], None, None, totals)
        else:
            old = [self.logprobs(mini.micro_batches) for mini in mini_batches]
            weights = self._weights(mini_batches, old, totals)
            for _ in range(algorithm.num_epochs):
                for index, mini in enumerate(mini_batches):
                    self._update(mini, old[index], weights[index], totals)
        return self._result(totals)

    def logprobs(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities of every micro batch's responses, [R] each, without gradients; last stage only."""

        def keep(number: int, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor]:
            del number
            return scores.logprobs.sum() * 0.0, scores.logprobs.detach()

        packed = [micro.packed for micro in micro_batches]
        return run_schedule(self.chunks, packed, keep, temperature=self._temperature, backward=False)

    def _weights(
        self, mini_batches: Sequence[LoadedMiniBatch], old: Sequence[list[torch.Tensor]], totals: _StepSums
    ) -> list[list[torch.Tensor]]:
        """Correction weights of the whole step, [R] each, and its mismatch; empty lists before the last stage."""
        if not self._is_last:
            return [[] for _ in mini_batches]
        pairs = [
            [
                (micro, micro.against(_real(micro, logprobs)))
                for micro, logprobs in zip(mini.micro_batches, of_mini, strict=True)
            ]
            for mini, of_mini in zip(mini_batches, old, strict=True)
        ]
        sums = self._normalization([pair for of_mini in pairs for _, pair in of_mini])
        return [[self._micro_weights(micro, pair, totals, sums) for micro, pair in of_mini] for of_mini in pairs]

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

    def _micro_weights(
        self, micro: LoadedMicroBatch, pair: PackedLogprobs, totals: _StepSums, sums: torch.Tensor | None
    ) -> torch.Tensor:
        config = self._algorithm.correction
        totals.mismatch = totals.mismatch.merge(MismatchSums.of(pair, config=config))
        weights = final_weights(pair, config=config, sums=sums)
        totals.by_age.add(pair, weights, micro.staleness)
        return weights

    def _update(
        self,
        mini: LoadedMiniBatch,
        old: list[torch.Tensor] | None,
        weights: list[torch.Tensor] | None,
        totals: _StepSums,
    ) -> None:
        """One optimizer step. Without `old`, the forward's own log-probabilities are the old ones."""

        def loss(number: int, scores: TokenScores) -> tuple[torch.Tensor, LossOutput]:
            micro = mini.micro_batches[number]
            logprobs = _real(micro, scores.logprobs)
            old_logprobs = logprobs.detach() if old is None else _real(micro, old[number])
            micro_weights = (
                self._micro_weights(micro, micro.against(old_logprobs), totals, None)
                if weights is None
                else weights[number]
            )
            output = self._micro_loss(mini, micro, logprobs, _real(micro, scores.entropy), old_logprobs, micro_weights)
            return output.loss, output

        packed = [micro.packed for micro in mini.micro_batches]
        outputs, grad_norm = self._optimizer_step(packed, loss, temperature=self._temperature)
        for output in outputs:
            totals.add(output.metrics)
        totals.count(grad_norm)

    def _micro_loss(
        self,
        mini: LoadedMiniBatch,
        micro: LoadedMicroBatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        old_logprobs: torch.Tensor,
        weights: torch.Tensor,
    ) -> LossOutput:
        algorithm = self._algorithm
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy if algorithm.entropy_bonus else entropy.detach(),
            old_logprobs=old_logprobs,
            advantages=micro.advantages,
            weights=weights,
            coefficients=coefficients(
                micro.lengths,
                aggregation=algorithm.aggregation,
                num_tokens=mini.num_tokens,
                num_sequences=mini.num_sequences,
            ),
            lengths=micro.lengths,
            num_tokens=mini.num_tokens,
        )
        settings = LossSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            entropy_bonus=algorithm.entropy_bonus,
        )
        return self._loss(inputs, settings)

    def sft_step(self, packed: Sequence[PackedBatch], is_dummy: Sequence[bool], num_tokens: int) -> StepResult:
        """One optimizer step of SFT: mean negative log-probability over `num_tokens`, at temperature 1."""

        def loss(number: int, scores: TokenScores) -> tuple[torch.Tensor, LossOutput]:
            share = torch.full_like(scores.logprobs, 0.0 if is_dummy[number] else 1.0 / num_tokens)
            output = sft_loss(scores.logprobs, coefficients=share)
            return output.loss, output

        totals = _StepSums(MismatchSums.empty(config=self._algorithm.correction), SumsByAge.empty(0))
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
        if clock is not None:
            for batch, seconds in zip(packed, clock.seconds(), strict=False):  # the last micro batch is not timed
                self._times.add(np.diff(batch.cu_seqlens.cpu().numpy()), seconds)
        self._is_warm = True
        if not gradients_are_finite(self.chunks):
            return outputs, None
        self.schedule.step(increment=1)
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
        group = parallel_state.get_data_parallel_group()
        names = sorted(totals.sums)
        losses = torch.tensor([totals.sums[name] for name in names], dtype=torch.float64)
        summed, maximised = totals.mismatch.vectors()
        by_age = totals.by_age.sums
        sums = torch.cat([losses, by_age.flatten(), summed]).to(self._device)
        maximised = maximised.to(self._device)
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
