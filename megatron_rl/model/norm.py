"""RMS norm for Megatron's local layer spec.

Megatron's wrapper around `torch.nn.RMSNorm` ignores `params_dtype` and refuses sequence parallelism. There each rank
sees a part of the rows, so the weight's gradients must be summed over tensor-parallel ranks. Megatron sums them for
every parameter with `sequence_parallel = True`, which this class sets.

CPU: torch has no fused RMS norm, and its separate operations cost as much as the matrix products of a small model.
`rms_norm` needs a third of their passes over memory.

    y = w x r,   r = (mean(x^2) + eps)^(-1/2),   u = x r
    d x = r (w g - u mean(w g u)),   d w = sum over rows of g u
"""

from typing import Protocol

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with the constructor that Megatron's specs call."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.norm_eps = eps
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., hidden size], normalised over its last dimension, in its own dtype."""
        if x.is_cuda:
            return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.norm_eps)
        return rms_norm(x, self.weight, eps=self.norm_eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, computed in FP32, returned in the dtype of `x`."""
    normed: torch.Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _Context(Protocol):
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x_float = x.float()
        norm: torch.Tensor = torch.linalg.vector_norm(x_float, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x_float * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        grad_float, u = grad.float(), x.float() * r
        grad_weight = (grad_float * u).flatten(0, -2).sum(dim=0)
        grad_u = grad_float * weight
        along = (grad_u * u).sum(dim=-1, keepdim=True).div_(-x.shape[-1])
        grad_x = grad_u.addcmul_(u, along).mul_(r)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
