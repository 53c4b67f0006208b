"""RMS norm for Megatron's local layer spec.

Megatron's own wrapper around `torch.nn.RMSNorm` ignores `params_dtype` and refuses sequence
parallelism, under which each rank sees a part of the rows, so that the weight's gradients must be
summed over the tensor-parallel ranks. Megatron does that sum for every parameter that says
`sequence_parallel = True`; this class says it.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with the constructor that Megatron's specs call."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
