"""Looks at Megatron's gradient buffers before an optimizer does."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel


def gradients_are_finite(chunks: Sequence[DistributedDataParallel]) -> bool:
    """Whether every gradient on every rank is finite; a collective over the whole world, after the reduction."""
    bad = torch.zeros(1, device=next(chunks[0].parameters()).device)
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            bad += (~torch.isfinite(buffer.grad_data.sum())).float()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return float(bad) == 0.0
