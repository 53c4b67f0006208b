"""Emulates FP8 matrix products on CPUs, which have no kernel for them: numerics of FP8, at most the speed of BF16.

On a CPU, vLLM multiplies FP8 by channel at a fifth of BF16's speed, and FP8 by blocks only with AMX, with activations
in BF16. The kernels here quantise activations as GPU kernels do (per token, or per token and 128 inputs) and multiply
codes in BF16, which holds every e4m3 number exactly. They have the first place on every CPU, so that machines agree.
**Their speed says nothing about FP8**; their names, which an engine logs, say that they emulate.

Differences from a GPU: a product is rounded to BF16 before its scales and once more after them, and blocks' scales are
multiplied into the weights, which rounds them to BF16: 2^-9 relative, against 2^-4 for an e4m3 code.

Shape legend: T tokens, N output channels, K inputs, G groups of 128 inputs.
"""

import torch
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum, current_platform

from rollout.cpu.e4m3 import e4m3_numbers, e4m3_scaled
from rollout.weights.format import FP8_BLOCK

Support = tuple[bool, str | None]


class EmulatedFp8Channel(FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """`fp8_channel`: a scale for each output channel, and a scale for each token."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Support:
        """Supported on CPUs only."""
        return (True, None) if current_platform.is_cpu() else (False, "emulates FP8 on CPUs")

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> Support:
        """Whether weights have channel scales, and inputs dynamic token scales."""
        weight, activation = c.weight_quant_key.scale, c.activation_quant_key.scale
        if weight.group_shape.is_per_channel() and activation.group_shape.is_per_token() and not activation.static:
            return True, None
        return False, "needs a scale for each output channel and a dynamic scale for each token"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Store the codes as BF16 numbers, [K, N]."""
        name = self.layer_param_names[0]
        replace_parameter(layer, name, e4m3_numbers(getattr(layer, name).data))

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """Codes A [T, K] times codes B [K, N], then the scales As [T, 1] and Bs [N, 1]."""
        product = (A.to(torch.bfloat16) @ B).float() * As * Bs.view(1, -1)
        if bias is not None:
            product += bias
        return product.to(out_dtype).view(*output_shape)


class EmulatedFp8Block(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """`fp8_block`: a scale for each 128 x 128 weights, and a scale for each token and 128 inputs."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Support:
        """Supported on CPUs only."""
        return (True, None) if current_platform.is_cpu() else (False, "emulates FP8 on CPUs")

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> Support:
        """Whether blocks have 128 x 128 weights."""
        shape = config.weight_quant_key.scale.group_shape
        if (shape.row, shape.col) != (FP8_BLOCK, FP8_BLOCK):
            return False, f"needs blocks of {FP8_BLOCK} x {FP8_BLOCK}"
        supported: Support = super().can_implement(config)
        return supported

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Store weights, codes times scales, as BF16 numbers [N, K]."""
        params = self._get_layer_params(layer)
        replace_parameter(layer, params.WEIGHT, e4m3_scaled(params.weight.data, params.block_scale.float()))

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """Codes A [T, K] with scales As [T, G], times weights B [N, K]."""
        groups = A.float().view(A.shape[0], -1, FP8_BLOCK) * As.unsqueeze(-1)
        return groups.view(A.shape).to(torch.bfloat16) @ B.t()


def register() -> None:
    """Put these kernels before vLLM's own; a second call changes nothing."""
    for offered, kernel in (
        (kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU], EmulatedFp8Channel),
        (kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU], EmulatedFp8Block),
    ):
        if kernel not in offered:
            offered.insert(0, kernel)
