"""One step of policy learning on one trainer rank: old log-probabilities, correction, optimizer steps.

SPMD: all ranks call every method together with the same `TrainBatch`. Scores exist on the last pipeline stage only,
so weights, losses and metrics are computed there. The other stages run the same schedules and keep nothing.

If a training step has a single optimizer step, `old_logprobs` are the forward's own `logprobs.detach()`, and no second
forward is needed. Otherwise one forward over all samples comes first, because the proximal policy is the policy before
the first mini batch. Batch normalisation and means over kept tokens need that forward too.

The schedule of the learning rate advances by the configured number of optimizer steps in every training step. Groups
that were dropped and updates that were skipped do not stretch it. A decay over the whole run follows the steps, also if
a resume changes the number of optimizer steps of each. The policy's schedule begins after the critic's warm-up, because
Adam's first update needs the warm-up of the learning rate.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.algorithm.aggregation import Denominators, MeanInputs
from megatron_rl.algorithm.coefficients import Coefficients
from megatron_rl.algorithm.columns import Columns, LossInputs
from megatron_rl.algorithm.mismatch import MismatchSums, SumsByAge
from megatron_rl.algorithm.objective import BoundLoss, LossOutput, Terms, objective, sft_loss
from megatron_rl.algorithm.plug_in import load_stage, needed_columns
from megatron_rl.algorithm_settings import AGGREGATIONS, LOSSES
from megatron_rl.batching.batch import RankBatch
from megatron_rl.batching.cost_model import MeasuredTimes
from megatron_rl.config import AlgorithmConfig
from megatron_rl.model.logprobs import TokenScores
from megatron_rl.model.packed_batch import PackedBatch
from megatron_rl.trainer.critic import CriticStep, ValueTargets
from megatron_rl.trainer.further_models import POLICY_ONLY, FurtherModels
from megatron_rl.trainer.loaded_batch import FetchColumns, LoadedMicroBatch, LoadedMiniBatch, load_mini_batch
from megatron_rl.trainer.messages import StepResult
from megatron_rl.trainer.optimizer import LearnedModel
from megatron_rl.trainer.pipeline import MicroBatchClock, OnScores, forward_logprobs
from megatron_rl.trainer.preparation import (
    Prepared,
    further_columns,
    kept_denominators,
    normalization,
    prepare,
    token_advantage,
    with_token_advantages,
)
from megatron_rl.trainer.step_sums import StepSums
from rollout import progress


class Learner:
    """Model, optimizer and algorithm on one rank."""

    def __init__(
        self,
        model: LearnedModel,
        *,
        algorithm: AlgorithmConfig,
        temperature: float,
        max_response_tokens: int,
        row_multiple: int,
        device: torch.device,
        models: FurtherModels = POLICY_ONLY,
    ) -> None:
        """`temperature` and `max_response_tokens` are the sampler's; packed rows are padded to a multiple of
        `row_multiple`. `models` are those that the algorithm's functions need beside the policy.
        """
        self._model = model
        self._algorithm = algorithm
        self._temperature = temperature
        self._max_response_tokens = max_response_tokens
        self._row_multiple = row_multiple
        self._device = device
        self._loss = cast(BoundLoss, load_stage(LOSSES, algorithm.loss).function)
        self._shares = cast(
            Callable[[MeanInputs], torch.Tensor], load_stage(AGGREGATIONS, algorithm.aggregation).function
        )
        self._token_advantage = token_advantage(algorithm)
        self._needed = needed_columns(algorithm)
        models.check(self._needed)
        self._models = models
        self.coefficients = Coefficients.first(algorithm)
        """Of the next step's loss."""
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
        self._begin_schedules(batch.policy_version)
        progress.mark("responses")
        mini_batches = [
            load_mini_batch(mini, fetch, multiple_of=self._row_multiple, device=self._device)
            for mini in batch.mini_batches
        ]
        further = further_columns(mini_batches, self._models, self._needed)
        critic, values = self._models.critic, None
        alone = critic is not None and critic.learns_alone(batch.policy_version)
        if len(mini_batches) == algorithm.num_epochs == 1 and not self._needs_all_logprobs:
            (mini,) = mini_batches
            self._update(mini, self._planned_denominators(mini), totals, further[0])
        elif mini_batches:
            prepared = self._prepared(mini_batches, further, totals)
            values = None if critic is None else critic.begin_step(mini_batches, self._targets(mini_batches, prepared))
            for _ in range(algorithm.num_epochs):
                for number, (denominators, micros) in enumerate(prepared):
                    if values is not None:
                        values.update(number)
                    if not alone:
                        self._update(mini_batches[number], denominators, totals, further[number], micros)
        result = self._result(totals, self._of_critic(values))
        if not alone:  # else the policy has not moved, which says nothing about its coefficients
            # after the result, which has the rate of the last update
            self._model.finish_schedule(configured=algorithm.updates_per_step, made=totals.updates)
            self._adapt(result, num_responses=sum(mini.num_sequences for mini in mini_batches))
        return result

    def _begin_schedules(self, finished_steps: int) -> None:
        critic, configured, alone = self._models.critic, self._algorithm.updates_per_step, 0
        if critic is not None:
            alone = critic.steps_alone(finished_steps)
            critic.model.begin_schedule(finished_steps, configured=configured)
        self._model.begin_schedule(finished_steps - alone, configured=configured)

    def use_cap(self, cap: float) -> None:
        """Correct with this cap from now on."""
        correction = self._algorithm.correction.model_copy(update={"cap": cap})
        self._algorithm = self._algorithm.model_copy(update={"correction": correction})

    def _of_critic(self, step: CriticStep | None) -> dict[str, float]:
        """Metrics of the critic's step; without a mini batch it only advances its schedule."""
        critic = self._models.critic
        if critic is None:
            return {}
        return (step or critic.begin_step((), ())).finish(configured=self._algorithm.updates_per_step)

    def _targets(
        self, mini_batches: Sequence[LoadedMiniBatch], prepared: Sequence[tuple[Denominators, Sequence[Prepared]]]
    ) -> list[list[ValueTargets]]:
        """What the critic learns from each micro batch; every sampled token counts."""
        return [
            [
                ValueTargets(
                    old_values=known.further["values"],
                    returns=known.returns,
                    shares=self._shares(
                        MeanInputs(
                            lengths=micro.lengths,
                            counted=micro.loss_mask,
                            denominators=self._planned_denominators(mini),
                        )
                    ),
                )
                for micro, known in zip(mini.micro_batches, micros, strict=False)
            ]
            for mini, (_, micros) in zip(mini_batches, prepared, strict=True)
        ]

    def _no_sums(self, max_staleness: int) -> StepSums:
        return StepSums(
            MismatchSums.empty(config=self._algorithm.correction, device=self._device),
            SumsByAge.empty(max_staleness, self._device),
        )

    def saved_coefficients(self) -> dict[str, float]:
        """The coefficients for a checkpoint."""
        return self.coefficients.state_dict(self._algorithm)

    def restore_coefficients(self, state: object) -> None:
        """Set the coefficients of a checkpoint; those of earlier versions have none."""
        if isinstance(state, Mapping) and state:
            self.coefficients = self.coefficients.restored(self._algorithm, state)

    @property
    def _needs_all_logprobs(self) -> bool:
        """Whether weights or denominators are sums of the whole step, advantages are of tokens, or a critic learns."""
        needs_tokens = self._token_advantage is not None or self._models.critic is not None
        return self._algorithm.needs_all_logprobs or needs_tokens

    def logprobs(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities of every micro batch's responses, [R] each, without gradients; last stage only."""
        packed = [micro.packed for micro in micro_batches]
        return forward_logprobs(self._model.chunks, packed, temperature=self._temperature)

    def _prepared(
        self, mini_batches: Sequence[LoadedMiniBatch], further: Sequence[Sequence[Columns]], totals: StepSums
    ) -> list[tuple[Denominators, list[Prepared]]]:
        """Denominators and prepared micro batches of each mini batch, and the step's mismatch.

        Runs a forward over all samples. Before the last stage there are no prepared micro batches.
        """
        totals.is_prepared = True
        old = [self.logprobs(mini.micro_batches) for mini in mini_batches]
        if not self._is_last:
            return [(self._planned_denominators(mini), []) for mini in mini_batches]
        micros = [micro for mini in mini_batches for micro in mini.micro_batches]
        columns = [each for of_mini in further for each in of_mini]
        flat = (each for of_mini in old for each in of_mini)
        logprobs = [micro.real(each) for micro, each in zip(micros, flat, strict=True)]
        pairs = [micro.against(each) for micro, each in zip(micros, logprobs, strict=True)]
        sums = normalization(pairs, algorithm=self._algorithm, device=self._device)
        prepared = [
            self._prepare(micro, each, of_micro, totals, sums)
            for micro, each, of_micro in zip(micros, logprobs, columns, strict=True)
        ]
        if self._token_advantage is not None:
            prepared, totals.of_step = with_token_advantages(
                micros,
                prepared,
                self._token_advantage,
                algorithm=self._algorithm,
                kl_coefficient=self.coefficients.kl,
            )
        rest = iter(prepared)
        by_mini = [[next(rest) for _ in mini.micro_batches] for mini in mini_batches]
        return list(zip(self._denominators(mini_batches, by_mini), by_mini, strict=True))

    def _planned_denominators(self, mini: LoadedMiniBatch) -> Denominators:
        return Denominators(
            num_tokens=mini.num_tokens,
            num_sequences=mini.num_sequences,
            max_response_tokens=self._max_response_tokens,
        )

    def _denominators(
        self, mini_batches: Sequence[LoadedMiniBatch], prepared: Sequence[Sequence[Prepared]]
    ) -> list[Denominators]:
        """What each mini batch counts over data-parallel ranks; last stage only."""
        if not self._algorithm.correction.counts_kept_tokens:
            return [self._planned_denominators(mini) for mini in mini_batches]
        return kept_denominators(
            mini_batches, prepared, max_response_tokens=self._max_response_tokens, device=self._device
        )

    def _prepare(
        self,
        micro: LoadedMicroBatch,
        old_logprobs: torch.Tensor,
        further: Columns,
        totals: StepSums,
        sums: torch.Tensor | None = None,
    ) -> Prepared:
        """One micro batch, and its share of the step's mismatch."""
        pair, sampled = micro.against(old_logprobs), micro.sampled
        totals.mismatch = totals.mismatch.merge(MismatchSums.of(pair, config=self._algorithm.correction))
        prepared = prepare(micro, old_logprobs, further, algorithm=self._algorithm, sums=sums)
        weights, staleness = sampled.select(prepared.weights), micro.staleness.index_select(0, sampled.sequences)
        totals.by_age.add(pair, weights, staleness)
        return prepared

    def _update(
        self,
        mini: LoadedMiniBatch,
        denominators: Denominators,
        totals: StepSums,
        further: Sequence[Columns],
        prepared: Sequence[Prepared] | None = None,
    ) -> None:
        """One optimizer step. Without `prepared`, the forward's own log-probabilities are the old ones."""

        def loss(number: int, scores: TokenScores) -> tuple[torch.Tensor, LossOutput]:
            micro = mini.micro_batches[number]
            logprobs = micro.real(scores.logprobs)
            known = (
                self._prepare(micro, logprobs.detach(), further[number], totals)
                if prepared is None
                else prepared[number]
            )
            entropy = micro.real(scores.entropy)
            inputs = LossInputs(
                logprobs=logprobs,
                entropy=entropy if self._algorithm.entropy.is_on else entropy.detach(),
                old_logprobs=known.old_logprobs,
                rollout_logprobs=micro.rollout_logprobs,
                advantages=known.advantages,
                coefficients=self._shares(
                    MeanInputs(lengths=micro.lengths, counted=known.counted, denominators=denominators)
                ),
                loss_mask=micro.loss_mask,
                staleness=micro.staleness,
                lengths=micro.lengths,
                num_tokens=mini.num_tokens,
                further=known.further,
            )
            output = objective(self._loss, inputs, weights=known.weights, terms=self._terms)
            return output.loss, output

        packed = [micro.packed for micro in mini.micro_batches]
        outputs, grad_norm = self._optimizer_step(packed, loss, temperature=self._temperature)
        for output in outputs:
            totals.add(output.metrics)
        totals.count(grad_norm)

    @property
    def _terms(self) -> Terms:
        """What this step's loss adds to the policy loss."""
        kl = self._algorithm.kl
        return Terms(
            kl_estimator=kl.estimator,
            kl_coefficient=self.coefficients.kl if kl.place == "loss" else None,
            entropy_coefficient=self.coefficients.entropy_bonus,
        )

    def _adapt(self, result: StepResult, *, num_responses: int) -> None:
        """Set the coefficients of the next step from this step's metrics; a collective if any adapts."""
        algorithm = self._algorithm
        if not algorithm.kl.target and not algorithm.entropy.target:
            return
        kl_name = "actor/kl" if algorithm.kl.place == "loss" else "actor/reward_kl_penalty"
        means = torch.tensor([result.metrics.get(name, np.nan) for name in (kl_name, "actor/entropy")])
        means = means.to(self._device, torch.float64)
        if self._has_pipeline:
            dist.broadcast(
                means,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        kl, entropy = (None if np.isnan(value) else value for value in means.tolist())
        self.coefficients = self.coefficients.next(algorithm, kl=kl, entropy=entropy, num_responses=num_responses)

    def sft_step(self, packed: Sequence[PackedBatch], is_dummy: Sequence[bool], num_tokens: int) -> StepResult:
        """One optimizer step of SFT: mean negative log-probability over `num_tokens`, at temperature 1.

        The schedule advances also if the update is skipped.
        """

        def loss(number: int, scores: TokenScores) -> tuple[torch.Tensor, LossOutput]:
            share = torch.full_like(scores.logprobs, 0.0 if is_dummy[number] else 1.0 / num_tokens)
            output = sft_loss(scores.logprobs, coefficients=share)
            return output.loss, output

        totals = self._no_sums(0)
        outputs, grad_norm = self._optimizer_step(packed, loss, temperature=1.0)
        for output in outputs:
            totals.add(output.metrics)
        totals.count(grad_norm)
        result = self._result(totals, {})
        self._model.finish_schedule(configured=1, made=totals.updates)
        return result

    def _optimizer_step(
        self, packed: Sequence[PackedBatch], loss: OnScores[LossOutput], *, temperature: float
    ) -> tuple[list[LossOutput], float | None]:
        """One update, and the times of its micro batches; see `LearnedModel.update`."""
        clock = MicroBatchClock(self._device) if self._is_warm and not self._has_pipeline else None
        outputs, grad_norm = self._model.update(packed, loss, temperature=temperature, clock=clock)
        if clock is not None:
            for batch, seconds in zip(packed, clock.seconds(), strict=False):  # the last micro batch is not timed
                self._times.add(np.diff(batch.cu_seqlens.cpu().numpy()), seconds)
        self._is_warm = True
        return outputs, grad_norm

    def _result(self, totals: StepSums, further: Mapping[str, float]) -> StepResult:
        metrics = {"actor/lr": self._model.learning_rate, **self._measured(), **self._coefficients(), **further}
        if totals.grad_norms:
            metrics["actor/grad_norm"] = sum(totals.grad_norms) / len(totals.grad_norms)
        if self._is_last and totals.has_sums:
            progress.mark("metrics")
            metrics |= totals.reduced()
        return StepResult(metrics=metrics, num_optimizer_steps=totals.updates, num_skipped_updates=totals.skipped)

    def _coefficients(self) -> dict[str, float]:
        """Coefficients of this step's further terms."""
        metrics = {}
        if self._algorithm.kl.place != "none":
            metrics["actor/kl_coef"] = self.coefficients.kl
        if self._algorithm.entropy.is_on:
            metrics["actor/entropy_coeff"] = self.coefficients.entropy_bonus
        return metrics

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
