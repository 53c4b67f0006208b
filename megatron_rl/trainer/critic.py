"""The critic on one trainer rank: values of states before a step's updates, and its own updates.

SPMD like the learner: all ranks call every method together. Values exist on the last pipeline stage only. Each
token brings its share of the mini batch's mean, so gradients do not depend on the split into micro batches.

A value belongs to the state before a response token. It is never divided by a temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """Each token's share of the mini batch's mean; zero for tokens that do not count."""


@dataclass(slots=True)
class CriticSums:
    """Sums of a step on this rank."""

    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Float64 scalars on the device."""
    grad_norms: list[float] = field(default_factory=list)
    updates: int = 0
    skipped: int = 0

    def add(self, metrics: dict[str, torch.Tensor]) -> None:
        """Add the metrics of a micro batch."""
        for name, value in metrics.items():
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value.double()

    def count(self, grad_norm: float | None) -> None:
        """Count an update; None is a skipped one."""
        if grad_norm is None:
            self.skipped += 1
        else:
            self.updates += 1
            self.grad_norms.append(grad_norm)


class Critic:
    """The model of values, and how it learns."""

    def __init__(self, model: LearnedModel, config: CriticConfig) -> None:
        self.model = model
        self._config = config

    def learns_alone(self, policy_version: int) -> bool:
        """Whether the policy waits in the step that begins with this version."""
        return policy_version < self._config.warmup_steps

    def values(self, micro_batches: Sequence[LoadedMicroBatch]) -> list[torch.Tensor]:
        """Values of the states before the response tokens of every micro batch, [R] each; last stage only.

        A dummy has the one value of its dummy token.
        """

        def keep(number: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            del number
            return values.sum() * 0.0, values.detach()

        packed = [micro.packed for micro in micro_batches]
        return run_schedule(self.model.chunks, packed, keep, temperature=None, backward=False)

    def update(self, mini: LoadedMiniBatch, targets: Sequence[ValueTargets], sums: CriticSums) -> None:
        """One optimizer step; `targets` in the order of the micro batches, on the last stage."""

        def loss(number: int, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            micro, target = mini.micro_batches[number], targets[number]
            found = _real(micro, values)
            inputs = ValueInputs(
                values=found,
                old_values=target.old_values,
                returns=target.returns,
                coefficients=target.shares,
                num_tokens=mini.num_tokens,
            )
            return value_loss(inputs, clip=self._config.clip_value)

        packed = [micro.packed for micro in mini.micro_batches]
        outcomes, grad_norm = self.model.update(packed, loss, temperature=None)
        for metrics in outcomes:
            sums.add(metrics)
        sums.count(grad_norm)

    def metrics(self, sums: CriticSums, targets: Sequence[ValueTargets]) -> dict[str, float]:
        """Metrics of a step whose samples have `targets`; complete on the last stage. A collective of that stage."""
        metrics = {"critic/lr": self.model.learning_rate, "critic/skipped_updates": float(sums.skipped)}
        if sums.grad_norms:
            metrics["critic/grad_norm"] = sum(sums.grad_norms) / len(sums.grad_norms)
        attempts = sums.updates + sums.skipped
        if not parallel_state.is_pipeline_last_stage() or not attempts:
            return metrics
        names = sorted(sums.metrics)
        losses = torch.stack([sums.metrics[name] for name in names])
        reduced = torch.cat([losses, _moments(targets)])
        dist.all_reduce(reduced, group=parallel_state.get_data_parallel_group())
        found = reduced.tolist()
        metrics |= {name: value / attempts for name, value in zip(names, found, strict=False)}
        return metrics | _explained(found[len(names) :])


def _real(micro: LoadedMicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Values of a micro batch, without that of a dummy token."""
    return values[:0] if micro.is_dummy else values


def _moments(targets: Sequence[ValueTargets]) -> torch.Tensor:
    """Count; sums of values, returns and their differences; sums of squares of returns and differences. Float64."""
    values = torch.cat([target.old_values for target in targets]).double()
    returns = torch.cat([target.returns for target in targets]).double()
    rest = returns - values
    return torch.stack(
        [values.new_tensor(len(values)), values.sum(), returns.sum(), rest.sum(), returns.square().sum(),
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
