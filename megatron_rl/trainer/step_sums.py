"""Sums of a training step on one rank, and the step's metrics from the sums of all data-parallel ranks.

Tensors stay on the device until the step is over, because reading one would wait for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.algorithm.mismatch import MismatchSums, SumsByAge


@dataclass(slots=True)
class StepSums:
    """Sums of a step on this rank."""

    mismatch: MismatchSums
    by_age: SumsByAge
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Float64 scalars of optimizer steps."""
    of_step: dict[str, torch.Tensor] = field(default_factory=dict)
    """Float64 scalars that the preparation of the step has counted."""
    grad_norms: list[float] = field(default_factory=list)
    updates: int = 0
    skipped: int = 0
    is_prepared: bool = False
    """Whether a forward over all samples has measured the mismatch."""

    @property
    def attempts(self) -> int:
        """Optimizer steps, skipped ones included."""
        return self.updates + self.skipped

    @property
    def has_sums(self) -> bool:
        """Whether there is anything to reduce; the same on all data-parallel ranks."""
        return self.is_prepared or self.attempts > 0

    def add(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Add the metrics of one micro batch."""
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.double()

    def count(self, grad_norm: float | None) -> None:
        """Count an optimizer step; without a norm it was skipped."""
        if grad_norm is None:
            self.skipped += 1
        else:
            self.updates += 1
            self.grad_norms.append(grad_norm)

    def reduced(self) -> dict[str, float]:
        """Metrics of the step over data-parallel ranks; a collective. Those of the loss are means over its attempts."""
        group = parallel_state.get_data_parallel_group()
        values = {name: value / self.attempts for name, value in self.sums.items()} | self.of_step
        names = sorted(values)
        summed, maximised = self.mismatch.vectors()
        by_age = self.by_age.sums
        sums = torch.cat([*(values[name][None] for name in names), by_age.flatten(), summed])
        dist.all_reduce(sums, group=group)
        dist.all_reduce(maximised, op=dist.ReduceOp.MAX, group=group)
        sums, maximised = sums.cpu(), maximised.cpu()
        ages_end = len(names) + by_age.numel()
        mismatch = self.mismatch.from_vectors(sums[ages_end:], maximised)
        by_age = sums[len(names) : ages_end].reshape(by_age.shape)
        metrics = {name: float(value) for name, value in zip(names, sums, strict=False)}
        if self.of_step:
            metrics["actor/reward_kl_penalty"] = metrics.pop("kl") / max(metrics.pop("tokens"), 1.0)
        return metrics | mismatch.finalize() | SumsByAge(by_age).metrics()
