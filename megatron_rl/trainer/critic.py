"""The critic on one trainer rank: values of states before a step's updates, and its own updates.

SPMD like the learner: all ranks call every method together. Values exist on the last pipeline stage only. Each
token brings its share of the mini batch's mean, so gradients do not depend on the split into micro batches.

A value belongs to the state before a response token. It is never divided by a temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.algorithm.value_loss import ValueInputs, value_loss
from megatron_rl.config import CriticConfig
from megatron_rl.trainer.loaded_batch import LoadedMicroBatch, LoadedMiniBatch
from megatron_rl.trainer.optimizer import LearnedModel
from megatron_rl.trainer.pipeline import run_schedule

VARIANCE_EPS = 1e-5
"""Added to the variance of returns, as verl does, so that equal returns do not divide by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTargets:
    """What the critic learns from one micro batch; [R] each, empty for a dummy."""

    old_values: torch.Tensor
    """Before the step's first update."""
    returns: torch.Tensor
    shares: torch.Tensor
    """Each token's share of the mini batch's mean; zero for tokens that do not count, here and in metrics."""


class Critic:
    """The model of values."""

    def __init__(self, model: LearnedModel, config: CriticConfig) -> None:
        self.model = model
        self._config = config

    def learns_alone(self, policy_version: int) -> bool:
        """Whether the policy waits in the step that begins with this version."""
        return policy_version < self._config.warmup_steps

    def steps_alone(self, finished_steps: int) -> int:
        """In how many of the first `finished_steps` steps of the run the policy has waited."""
        return min(finished_steps, self._config.warmup_steps)

    def values(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Values of the states before the response tokens of every micro batch, [R] each; last stage only.

        A dummy has the one value of its dummy token.
        """

        def keep(number: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            del number
            return values.sum() * 0.0, values.detach()

        packed = [micro.packed for micro in micro_batches]
        return run_schedule(self.model.chunks, packed, keep, temperature=None, backward=False)

    def begin_step(
        self, mini_batches: Sequence[LoadedMiniBatch], targets: Sequence[Sequence[ValueTargets]]
    ) -> "CriticStep":
        """A step whose mini batches have these targets, by micro batch; targets are empty before the last stage."""
        return CriticStep(self.model, mini_batches, targets, clip=self._config.clip_value)


class CriticStep:
    """The updates of one step, and their sums on this rank."""

    def __init__(
        self,
        model: LearnedModel,
        mini_batches: Sequence[LoadedMiniBatch],
        targets: Sequence[Sequence[ValueTargets]],
        *,
        clip: float,
    ) -> None:
        self._model = model
        self._mini_batches = mini_batches
        self._targets = targets
        self._clip = clip
        self._sums: dict[str, torch.Tensor] = {}
        self._grad_norms: list[float] = []
        self._attempts = 0

    def update(self, number: int) -> None:
        """One optimizer step on a mini batch."""
        mini, targets = self._mini_batches[number], self._targets[number]

        def loss(position: int, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            target = targets[position]
            inputs = ValueInputs(
                values=mini.micro_batches[position].real(values),
                old_values=target.old_values,
                returns=target.returns,
                coefficients=target.shares,
                num_tokens=mini.num_tokens,
            )
            return value_loss(inputs, clip=self._clip)

        packed = [micro.packed for micro in mini.micro_batches]
        outcomes, grad_norm = self._model.update(packed, loss, temperature=None)
        for metrics in outcomes:
            for name, value in metrics.items():
                self._sums[name] = self._sums[name] + value if name in self._sums else value.double()
        self._attempts += 1
        if grad_norm is not None:
            self._grad_norms.append(grad_norm)

    def finish(self, *, configured: int) -> dict[str, float]:
        """Metrics of the step, complete on the last stage; a collective of that stage.

        The schedule advances by the `configured` optimizer steps, whatever was dropped or skipped.
        """
        updates = len(self._grad_norms)
        metrics = {"critic/lr": self._model.learning_rate, "critic/skipped_updates": float(self._attempts - updates)}
        self._model.finish_schedule(configured=configured, made=updates)
        if updates:
            metrics["critic/grad_norm"] = sum(self._grad_norms) / updates
        if not self._attempts or not parallel_state.is_pipeline_last_stage():
            return metrics
        names = sorted(self._sums)
        losses = torch.stack([self._sums[name] for name in names])
        moments = _moments([target for of_mini in self._targets for target in of_mini])
        reduced = torch.cat([losses, moments])
        dist.all_reduce(reduced, group=parallel_state.get_data_parallel_group())
        found = reduced.tolist()
        metrics |= {name: value / self._attempts for name, value in zip(names, found, strict=False)}
        return metrics | _explained(found[len(names) :])


def _moments(targets: Sequence[ValueTargets]) -> torch.Tensor:
    """Count; sums of values, returns and their differences; sums of squares of returns and differences. Float64."""
    counts = torch.cat([target.shares for target in targets]) > 0
    values = torch.where(counts, torch.cat([target.old_values for target in targets]).double(), 0.0)
    returns = torch.where(counts, torch.cat([target.returns for target in targets]).double(), 0.0)
    rest = returns - values
    return torch.stack(
        [counts.double().sum(), values.sum(), returns.sum(), rest.sum(), returns.square().sum(),
         rest.square().sum()]
    )  # fmt: skip


def _explained(moments: Sequence[float]) -> dict[str, float]:
    count, values, returns, rest, squared_returns, squared_rest = moments
    if count < 2:
        return {}
    variance = (squared_returns - returns**2 / count) / (count - 1)
    unexplained = (squared_rest - rest**2 / count) / (count - 1)
    return {
        "critic/values/mean": values / count,
        "critic/returns/mean": returns / count,
        "critic/vf_explained_var": 1.0 - unexplained / (variance + VARIANCE_EPS),
    }
