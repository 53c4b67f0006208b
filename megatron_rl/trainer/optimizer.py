"""Megatron's gradient buffers, Adam and learning-rate schedule, set up for reinforcement learning.

The loss is already divided by the mini batch's global denominator (`TrainBatch`). So gradients are *summed* over micro
batches and data-parallel ranks and never averaged: `calculate_per_token_loss` turns Megatron's divisions off, and
`finalize` ignores its token count.

`gradients_are_finite` checks Megatron's gradient buffers before the optimizer step.

A `LearnedModel` has all three. The policy and the critic are two of them: both update in the same way, and both are
saved, restored and offloaded. Its optimizer's states may stay in host memory (`trainer.optimizer.states_on_host`). An
update then brings them to the device, where it computes what it would compute otherwise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import Fp8, OptimizerConfig
from megatron_rl.model.build import Dtype, PackedModel
from megatron_rl.model.packed_batch import PackedBatch
from megatron_rl.quantization.fp8_parameters import forget_first_weights
from megatron_rl.trainer.offload import HostedStates
from megatron_rl.trainer.pipeline import MicroBatchClock, Outcome, Output, run_schedule
from rollout import progress


def wrap(
    chunks: Sequence[GPTModel], *, distributed_optimizer: bool, fp8: Fp8 = "none"
) -> list[DistributedDataParallel]:
    """Wrap every chunk with Megatron's contiguous FP32 gradient buffers and set the finaliser that reduces them.

    FP8 parameters move their row-wise codes to a byte buffer, which data-parallel ranks gather.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=distributed_optimizer,
        fp8_param_gather=fp8 == "blockwise_param",
        check_for_nan_in_grad=False,
    )
    wrapped = []
    for index, chunk in enumerate(chunks):
        chunk.config.calculate_per_token_loss = True
        chunk.config.finalize_model_grads_func = finalize
        wrapped.append(
            DistributedDataParallel(config=chunk.config, ddp_config=config, module=chunk, disable_bucketing=index > 0)
        )
    return wrapped


def finalize(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: object | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Sum gradients over data, sequence-parallel and tied-embedding groups, without division."""
    del num_tokens
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def build_optimizer(
    config: OptimizerConfig, model: list[DistributedDataParallel], *, params_dtype: torch.dtype, fp8: Fp8 = "none"
) -> MegatronOptimizer:
    """Adam over FP32 masters, with global-norm clipping."""
    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        bf16=params_dtype == torch.bfloat16,
        fp16=False,
        params_dtype=params_dtype,
        clip_grad=config.clip_grad,
        use_distributed_optimizer=config.distributed,
        fp8_recipe=None if fp8 == "none" else "blockwise",
    )
    optimizer = get_megatron_optimizer(config=megatron_config, model_chunks=model)
    for chunk in model:
        forget_first_weights(chunk.parameters())
    return optimizer


@contextmanager
def loadable(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Context in which Megatron 0.16 can load a checkpoint, without a second copy of the moments.

    Without Transformer Engine, Megatron uses torch's Adam, which counts updates in each parameter's state. A
    distributed optimizer expects moments to exist before it loads them, so they are created. It gives all parameters
    the same count tensor, which each parameter would advance, so every parameter gets a copy.

    Transformer Engine's Adam copies each moment that it loads, beside those that were read, because moments may be
    scaled (`FusedAdam.load_state_dict`). Those of this project are FP32, which torch's own method keeps as they are.
    """
    counting = [
        part for part in _parts(optimizer) if isinstance(part, DistributedOptimizer) and _counts_by_parameter(part)
    ]
    for part in counting:
        _create_moments(part)
    copying = [part.optimizer for part in _parts(optimizer) if _copies_moments(part.optimizer)]
    for adam in copying:
        adam.load_state_dict = partial(torch.optim.Optimizer.load_state_dict, adam)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for adam in copying:
            del adam.load_state_dict
    for part in counting:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _copies_moments(adam: torch.optim.Optimizer) -> bool:
    return type(adam).load_state_dict is not torch.optim.Optimizer.load_state_dict


def create_moments(optimizer: MegatronOptimizer) -> None:
    """Create the moments of a model that has not learned yet, zeros as Adam's first step would, so that they can be
    saved. A policy has none while its critic warms up.
    """
    for part in _parts(optimizer):
        _create_moments(part)


def load_state(optimizer: MegatronOptimizer, state: Mapping[str, object]) -> None:
    """Give an optimizer a restored state. Megatron does not save a count of 0 updates, but torch's Adam needs it."""
    if any(map(_counts_by_parameter, _parts(optimizer))):
        _count_from_zero(state)
    optimizer.load_state_dict(state)


def _count_from_zero(state: object) -> None:
    if not isinstance(state, dict):
        return
    moments = state.get("state")
    if (
        isinstance(moments, dict)
        and "common_step" not in moments
        and any(isinstance(entry, dict) and "exp_avg" in entry for entry in moments.values())
    ):
        moments["common_step"] = torch.tensor(0.0)
    for inner in state.values():
        _count_from_zero(inner)


def _create_moments(part: MegatronOptimizer) -> None:
    counts = _counts_by_parameter(part)
    for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
        if not (state := part.optimizer.state[parameter]):
            if counts:
                state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _parts(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers of a chain: of dense parameters and of experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _counts_by_parameter(part: MegatronOptimizer) -> bool:
    """Whether the state of each parameter counts its updates, as torch's Adam does."""
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def build_schedule(
    config: OptimizerConfig, optimizer: MegatronOptimizer, *, total_steps: int
) -> OptimizerParamScheduler:
    """Linear warm-up, then the configured decay. Optimizer steps count from 1.

    A decay over the whole run would reach its end one step after the run, so that the last update still learns.
    """
    return OptimizerParamScheduler(
        optimizer=optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=min(config.min_learning_rate, config.learning_rate),
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=_decay_end(config, warmup_steps=config.warmup_steps, total_steps=total_steps),
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _decay_end(config: OptimizerConfig, *, warmup_steps: int, total_steps: int) -> int:
    """Optimizer step at which the decay has reached its end; it begins after the warm-up."""
    return max(config.decay_steps or total_steps + 1, warmup_steps + 1)


def follow_configuration(optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler) -> None:
    """Give every parameter group the configured rates, betas and eps, in place of those of a checkpoint.

    Megatron restores groups whole, and its schedule prefers the rates of a group to its own (`get_lr`).
    """
    for part in _parts(optimizer):
        configured = part.config
        for group in part.param_groups:
            group["max_lr"], group["min_lr"] = schedule.max_lr, schedule.min_lr
            group["betas"] = (configured.adam_beta1, configured.adam_beta2)
            group["eps"] = configured.adam_eps


def gradients_are_finite(chunks: Sequence[DistributedDataParallel]) -> bool:
    """Whether every gradient on every rank is finite. A collective over all ranks, after the reduction."""
    bad = torch.zeros(1, device=next(chunks[0].parameters()).device)
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            bad += (~torch.isfinite(buffer.grad_data.sum())).float()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return float(bad) == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedModel:
    """Chunks, optimizer and learning-rate schedule of one model, on one trainer rank."""

    chunks: tuple[DistributedDataParallel, ...]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    config: OptimizerConfig
    total_updates: int
    """Optimizer steps of the whole run."""
    hosted: HostedStates | None = None
    """Masters and moments that stay in host memory; None: they stay on the device."""

    @classmethod
    def of(
        cls, models: Sequence[PackedModel], config: OptimizerConfig, *, dtype: Dtype, total_updates: int, fp8: Fp8
    ) -> "LearnedModel":
        """Prepare loaded chunks to learn for `total_updates` optimizer steps."""
        chunks = wrap(models, distributed_optimizer=config.distributed, fp8=fp8)
        params_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        optimizer = build_optimizer(config, chunks, params_dtype=params_dtype, fp8=fp8)
        schedule = build_schedule(config, optimizer, total_steps=total_updates)
        hosted = HostedStates(chunks, optimizer) if config.states_on_host else None
        if hosted is not None:
            hosted.to_host()
        return cls(
            chunks=tuple(chunks),
            optimizer=optimizer,
            schedule=schedule,
            config=config,
            total_updates=total_updates,
            hosted=hosted,
        )

    def states_on_device(self) -> AbstractContextManager[None]:
        """Context in which masters and moments are on the device."""
        return nullcontext() if self.hosted is None else self.hosted.on_device()

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
        with self.states_on_device():
            _, grad_norm, _ = self.optimizer.step()
        return outcomes, float(grad_norm)

    def restore_schedule(self, saved: Mapping[str, float]) -> None:
        """Put the schedule at the position of a checkpoint, in optimizer steps, with the configured rates.

        A warm-up that was over then is never entered again, whatever its length is now.
        """
        self.schedule.load_state_dict(dict(saved))
        if saved["num_steps"] >= max(saved["lr_warmup_steps"], 1):
            self._set_warmup(int(saved["lr_warmup_steps"]))

    def begin_schedule(self, finished_steps: int, *, configured: int) -> None:
        """Put a decay over the whole run where a step begins, whose optimizer steps are `configured`.

        `finished_steps` are those in which this model could learn: a policy waits during the critic's warm-up.
        The position moves only after a resume with another number of optimizer steps a step, or another warm-up of the
        critic, once the warm-up is over: a warm-up counts the optimizer steps that were made. It is then as if all
        `finished_steps` had had the present number, and the warm-up keeps its share of these steps, so the rate goes on
        from where it was. Without finished steps the schedule begins. Any other schedule counts the optimizer steps
        that were made.
        """
        schedule, before, position = self.schedule, int(self.schedule.num_steps), finished_steps * configured
        if self.config.decay == "constant" or self.config.decay_steps or position == before:
            return
        if not position:  # the critic learns alone for longer than before: the schedule begins after it
            schedule.step(increment=-before)
            self._set_warmup(self.config.warmup_steps)
        elif before >= max(schedule.lr_warmup_steps, 1):
            schedule.step(increment=position - before)
            self._set_warmup(round(schedule.lr_warmup_steps * position / before))

    def _set_warmup(self, num_updates: int) -> None:
        """Let the decay begin after so many optimizer steps."""
        schedule = self.schedule
        schedule.lr_warmup_steps = num_updates
        schedule.lr_decay_steps = _decay_end(self.config, warmup_steps=num_updates, total_steps=self.total_updates)
        schedule.step(increment=0)  # which sets the present rate

    def finish_schedule(self, *, configured: int, made: int) -> None:
        """Advance the schedule by the configured optimizer steps that a training step did not make."""
        if configured > made:
            self.schedule.step(increment=configured - made)
