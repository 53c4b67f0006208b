"""A model that learns, on one trainer rank: its chunks with gradient buffers, its optimizer and its schedule.

The policy and the critic are two of them. Both update in the same way, and both are saved, restored and offloaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import Fp8, OptimizerConfig
from megatron_rl.model.build import Dtype, PackedModel
from megatron_rl.model.packed_batch import PackedBatch
from megatron_rl.trainer.optimizer import build_optimizer, build_schedule, gradients_are_finite, wrap
from megatron_rl.trainer.pipeline import MicroBatchClock, Outcome, Output, run_schedule
from rollout import progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedModel:
    """Chunks, optimizer and learning-rate schedule of one model."""

    chunks: tuple[DistributedDataParallel, ...]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler

    @classmethod
    def of(
        cls, models: Sequence[PackedModel], config: OptimizerConfig, *, dtype: Dtype, total_updates: int, fp8: Fp8
    ) -> "LearnedModel":
        """Prepare loaded chunks to learn for `total_updates` optimizer steps."""
        chunks = wrap(models, distributed_optimizer=config.distributed, fp8=fp8)
        params_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        optimizer = build_optimizer(config, chunks, params_dtype=params_dtype, fp8=fp8)
        schedule = build_schedule(config, optimizer, total_steps=total_updates)
        return cls(chunks=tuple(chunks), optimizer=optimizer, schedule=schedule)

    @property
    def learning_rate(self) -> float:
        """Of the last update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def update(
        self,
        packed: Sequence[PackedBatch],
        loss: Callable[[int, Output], tuple[torch.Tensor, Outcome]],
        *,
        temperature: float | None,
        clock: MicroBatchClock | None = None,
    ) -> tuple[list[Outcome], float | None]:
        """Forward, backward, clip, step. If any gradient is not finite, the update is skipped and the norm is None."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        outcomes = run_schedule(self.chunks, packed, loss, temperature=temperature, backward=True, clock=clock)
        progress.mark("gradients")
        if not gradients_are_finite(self.chunks):
            return outcomes, None
        self.schedule.step(increment=1)
        progress.mark("optimizer step")
        _, grad_norm, _ = self.optimizer.step()
        return outcomes, float(grad_norm)

    def finish_schedule(self, *, configured: int, made: int) -> None:
        """Advance the schedule by the configured optimizer steps that a training step did not make."""
        if configured > made:
            self.schedule.step(increment=configured - made)
