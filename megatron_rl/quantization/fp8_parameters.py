"""FP8 parameters: Transformer Engine's block-quantised tensors, as codes and scales.

Such a parameter looks like a BF16 tensor, and most torch functions decode it implicitly. A slice of it is a copy, so
writes to the slice are lost. Assigning to `.data` quantises. Its storage holds only the row-wise codes. So all code
that reads, writes or moves parameters goes through this file, which uses the tensor's fields.

Layout (transformer_engine 2.12, `pytorch/tensor/float8_blockwise_tensor.py` and its storage): `_rowwise_data` uint8 [N,
K], e4m3; `_rowwise_scale_inv` float32 [P, Q rounded up to a multiple of 4], whose columns from Q on have no meaning;
the same once more, transposed, for the backward pass. A weight is its code times its block's inverse scale.

FP8 parameters are recognised by their fields, not by their class, so nothing is imported without Transformer Engine.

Shape legend: N output channels, K inputs; P x Q the grid of blocks of 128 x 128.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch

from megatron_rl.quantization.fp8 import BLOCK, fp8_block_values

_NAN_CODE = 0x7F
"""Code of NaN in e4m3, without the sign bit."""


class _Quantizer(Protocol):
    force_pow_2_scales: bool


class Fp8Parameter(Protocol):
    """The fields used of a `Float8BlockwiseQTensor` with square blocks."""

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
    """Whether a parameter is an FP8 parameter."""
    return hasattr(tensor, "_rowwise_scale_inv") and hasattr(tensor, "_is_2D_scaled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Views of a parameter's codes and scales, in the parameter's memory."""

    codes: torch.Tensor
    """[N, K], e4m3."""
    inverse: torch.Tensor
    """Inverse scales, [P, Q], float32, without the padding columns."""
    dtype: torch.dtype
    """Dtype that the parameter shows."""

    @classmethod
    def of(cls, parameter: Fp8Parameter) -> "Blocks":
        """The current blocks of a parameter.

        Raises:
            RuntimeError: the parameter holds no row-wise codes, or scales of another layout.
        """
        codes, inverse = parameter._rowwise_data, parameter._rowwise_scale_inv
        if codes is None or inverse is None or not parameter._is_2D_scaled:
            raise RuntimeError("an FP8 parameter holds no row-wise codes with a scale for each 128 x 128 block")
        rows, columns = (-(-size // BLOCK) for size in codes.shape)
        if len(inverse) != rows or inverse.shape[1] < columns:
            raise RuntimeError(f"scales {tuple(inverse.shape)} do not belong to codes {tuple(codes.shape)}")
        return cls(codes=codes.view(torch.float8_e4m3fn), inverse=inverse[:, :columns], dtype=parameter.dtype)

    def scales(self, box: tuple[slice, ...]) -> torch.Tensor:
        """Inverse scales of the blocks that a box touches, float32."""
        rows, columns = (slice(span.start // BLOCK, -(-span.stop // BLOCK)) for span in box)
        return self.inverse[rows, columns]

    def values(self, box: tuple[slice, ...]) -> torch.Tensor:
        """Weights of a box; exact in bfloat16, as codes have four significant bits and scales are powers of two."""
        start = tuple(span.start for span in box)
        return fp8_block_values(self.codes[box], self.scales(box), start).to(self.dtype)

    def check(self, box: tuple[slice, ...]) -> None:
        """Refuse a box with weights that are not finite.

        Raises:
            ValueError: a code is NaN, or a scale is not finite.
        """
        codes = self.codes[box].view(torch.uint8)
        wrong = int(((codes & _NAN_CODE) == _NAN_CODE).sum()) + int((~torch.isfinite(self.scales(box))).sum())
        if wrong:
            raise ValueError(f"{wrong} FP8 codes and scales belong to weights that are not finite")


def values(parameter: torch.Tensor, box: tuple[slice, ...]) -> torch.Tensor:
    """Weights of a box of any parameter, in the dtype that it shows; read-only."""
    return Blocks.of(parameter).values(box) if is_fp8_parameter(parameter) else parameter.detach()[box]


def decoded(parameter: Fp8Parameter) -> torch.Tensor:
    """All weights of an FP8 parameter, [N, K] in the dtype that it shows."""
    return Blocks.of(parameter).values(tuple(slice(0, size) for size in parameter.shape))


def fill(parameter: Fp8Parameter, weight_NK: torch.Tensor) -> None:
    """Give an FP8 parameter its first weights, from which the optimizer makes its masters.

    Megatron's distributed optimizer makes FP32 masters from `get_high_precision_init_val()`
    (`DistributedOptimizer._build_model_and_main_param_groups`), where Transformer Engine keeps the parameter's
    meaningless initial values. Masters made from decoded codes would start with the rounding error of FP8.

    Args:
        parameter: a parameter that no optimizer has yet.
        weight_NK: on the CPU, in the dtype that the parameter shows; stays in memory until masters exist.

    Raises:
        ValueError: Transformer Engine was configured for scales that are not powers of two.
        RuntimeError: the parameter cannot hold first weights.
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
    """Release the weights that `fill` stored, once masters exist; Megatron does so only for masters it made itself."""
    for parameter in parameters:
        if is_fp8_parameter(parameter):
            parameter.clear_high_precision_init_val()


def buffers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's memory: codes and scales in both orientations if FP8, else the tensor itself."""
    if is_fp8_parameter(tensor):
        fields = (
            tensor._rowwise_data,
            tensor._rowwise_scale_inv,
            tensor._columnwise_data,
            tensor._columnwise_scale_inv,
        )
        yield from (field for field in fields if field is not None)
    else:
        yield tensor.detach()
