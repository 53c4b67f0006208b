"""Parameters that are FP8 themselves: Transformer Engine's block-quantised tensors, as codes and scales.

Such a parameter looks like a BF16 tensor, and most of torch treats it as one by decoding it behind the scenes: a slice
of it is a copy, so writing to the slice is lost; assigning to `.data` quantises; its storage is that of the codes by
rows alone. So whoever reads, writes or moves parameters asks this file, which uses the fields.

Layout (transformer_engine 2.12, `pytorch/tensor/float8_blockwise_tensor.py` and its storage): `_rowwise_data` uint8
[N, K], e4m3; `_rowwise_scale_inv` float32 [P, Q rounded up to a multiple of 4], of which the columns from Q on mean
nothing; the same once more transposed for the backward pass. A weight is its code times its block's inverse scale.

Known by their fields and not by their class, so that nothing is imported where there is no Transformer Engine.

Shape legend: N output channels, K inputs; P x Q the grid of blocks of 128 x 128.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch

from megatron_rl.quantization.fp8 import BLOCK, fp8_block_values

_NAN_CODE = 0x7F
"""Of e4m3, the sign apart."""


class _Quantizer(Protocol):
    force_pow_2_scales: bool


class Fp8Parameter(Protocol):
    """What is used of a `Float8BlockwiseQTensor` whose scales are of square blocks."""

    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None
    _is_2D_scaled: bool  # noqa: N815  upstream's name
    _quantizer: _Quantizer
    _high_precision_init_val: torch.Tensor

    def clear_high_precision_init_val(self) -> None:
        """Forget the first weights."""

    @property
    def shape(self) -> torch.Size:
        """[N, K]"""

    @property
    def dtype(self) -> torch.dtype:
        """What it looks like, and what it decodes to."""

    @property
    def device(self) -> torch.device:
        """Where it is."""

    def quantize_(self, tensor: torch.Tensor) -> object:
        """Take new weights [N, K], in place and in both orientations."""


def is_fp8_parameter(tensor: object) -> TypeGuard[Fp8Parameter]:
    """Whether a parameter is FP8 itself."""
    return hasattr(tensor, "_rowwise_scale_inv") and hasattr(tensor, "_is_2D_scaled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A view of a parameter's codes and scales; both are the parameter's own memory."""

    codes: torch.Tensor
    """[N, K], e4m3."""
    inverse: torch.Tensor
    """[P, Q], float32; without the padding of its rows."""
    dtype: torch.dtype
    """What the parameter looks like."""

    @classmethod
    def of(cls, parameter: Fp8Parameter) -> "Blocks":
        """The blocks of a parameter as they are now.

        Raises:
            RuntimeError: it holds no codes by rows, or scales of another layout.
        """
        codes, inverse = parameter._rowwise_data, parameter._rowwise_scale_inv
        if codes is None or inverse is None or not parameter._is_2D_scaled:
            raise RuntimeError("an FP8 parameter holds no codes by rows with a scale for each 128 x 128 of them")
        rows, columns = (-(-size // BLOCK) for size in codes.shape)
        if len(inverse) != rows or inverse.shape[1] < columns:
            raise RuntimeError(f"scales {tuple(inverse.shape)} do not belong to codes {tuple(codes.shape)}")
        return cls(codes=codes.view(torch.float8_e4m3fn), inverse=inverse[:, :columns], dtype=parameter.dtype)

    def scales(self, box: tuple[slice, ...]) -> torch.Tensor:
        """Inverse scales of the blocks that a box touches, float32."""
        rows, columns = (slice(one.start // BLOCK, -(-one.stop // BLOCK)) for one in box)
        return self.inverse[rows, columns]

    def values(self, box: tuple[slice, ...]) -> torch.Tensor:
        """Weights of a box; exact in bfloat16, since codes have four bits and scales are powers of two."""
        start = tuple(one.start for one in box)
        return fp8_block_values(self.codes[box], self.scales(box), start).to(self.dtype)

    def check(self, box: tuple[slice, ...]) -> None:
        """Refuse a box that holds what is no number.

        Raises:
            ValueError: a code is NaN, or a scale is not finite.
        """
        codes = self.codes[box].view(torch.uint8)
        wrong = int(((codes & _NAN_CODE) == _NAN_CODE).sum()) + int((~torch.isfinite(self.scales(box))).sum())
        if wrong:
            raise ValueError(f"{wrong} FP8 codes and scales are of non-finite weights")


def values(parameter: torch.Tensor, box: tuple[slice, ...]) -> torch.Tensor:
    """Weights of a box of any parameter, in the dtype that it shows; to be read only."""
    return Blocks.of(parameter).values(box) if is_fp8_parameter(parameter) else parameter.detach()[box]


def decoded(parameter: Fp8Parameter) -> torch.Tensor:
    """All weights of an FP8 parameter, [N, K] in the dtype that it shows."""
    return Blocks.of(parameter).values(tuple(slice(0, size) for size in parameter.shape))


def fill(parameter: Fp8Parameter, weight_NK: torch.Tensor) -> None:
    """Give an FP8 parameter its first weights, of which the optimizer will take its masters.

    Megatron's distributed optimizer makes FP32 masters of `get_high_precision_init_val()`
    (`DistributedOptimizer._build_model_and_main_param_groups`); Transformer Engine keeps there what the parameter was
    initialised to, which was never anything. Masters made of decoded codes would begin with the rounding of FP8.

    Args:
        parameter: built, and not yet given to an optimizer.
        weight_NK: on the CPU, in the dtype that the parameter shows; kept until there are masters.

    Raises:
        ValueError: Transformer Engine was told to use scales that are no powers of two.
        RuntimeError: the parameter has no place for its first weights.
    """
    if not parameter._quantizer.force_pow_2_scales:
        raise ValueError(
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES = 1: engines need block scales that are powers of two; unset it"
        )
    if not hasattr(parameter, "get_high_precision_init_val"):
        raise RuntimeError("an FP8 parameter keeps no preserve_high_precision_init_val; its master would be wrong")
    parameter.quantize_(weight_NK.to(parameter.device))
    parameter._high_precision_init_val = weight_NK


def forget_first_weights(parameters: Iterable[torch.Tensor]) -> None:
    """Let go of what `fill` has kept, once there are masters; Megatron does so only where it has made one itself."""
    for parameter in parameters:
        if is_fp8_parameter(parameter):
            parameter.clear_high_precision_init_val()


def buffers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold any tensor's memory: an FP8 one's codes and scales in both orientations, or itself."""
    if is_fp8_parameter(tensor):
        parts = (
            tensor._rowwise_data,
            tensor._rowwise_scale_inv,
            tensor._columnwise_data,
            tensor._columnwise_scale_inv,
        )
        yield from (part for part in parts if part is not None)
    else:
        yield tensor.detach()
