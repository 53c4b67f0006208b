"""Megatron's gradient buffers, Adam and learning-rate schedule, set up for reinforcement learning.

The loss is already divided by the mini batch's global denominator (`TrainBatch`). So gradients are *summed* over micro
batches and data-parallel ranks and never averaged: `calculate_per_token_loss` turns Megatron's divisions off, and
`finalize` ignores its token count.

`gradients_are_finite` checks Megatron's gradient buffers before the optimizer step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import Fp8, OptimizerConfig
from megatron_rl.quantization.fp8_parameters import forget_first_weights


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
    """Context in which Megatron 0.16 can load a checkpoint into a distributed optimizer with torch's Adam.

    Without Transformer Engine, Megatron uses torch's Adam, which counts updates in each parameter's state. Megatron
    expects moments to exist before it loads them, so they are created. It gives all parameters the same count tensor,
    which each parameter would advance, so every parameter gets a copy.
    """
    counting = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if _counts_by_parameter(part)]
    for part in counting:
        for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            if not (state := part.optimizer.state[parameter]):
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    yield
    for part in counting:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _counts_by_parameter(optimizer: MegatronOptimizer) -> bool:
    adams = (torch.optim.Adam, torch.optim.AdamW)
    return isinstance(optimizer, DistributedOptimizer) and isinstance(optimizer.optimizer, adams)


def build_schedule(
    config: OptimizerConfig, optimizer: MegatronOptimizer, *, total_steps: int
) -> OptimizerParamScheduler:
    """Linear warm-up, then the configured decay. Optimizer steps count from 1.

    A decay over the whole run would reach its end one step after the run, so that the last update still learns.
    """
    decay_steps = max(config.decay_steps or total_steps + 1, config.warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer=optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=min(config.min_learning_rate, config.learning_rate),
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def gradients_are_finite(chunks: Sequence[DistributedDataParallel]) -> bool:
    """Whether every gradient on every rank is finite. A collective over all ranks, after the reduction."""
    bad = torch.zeros(1, device=next(chunks[0].parameters()).device)
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            bad += (~torch.isfinite(buffer.grad_data.sum())).float()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return float(bad) == 0.0
