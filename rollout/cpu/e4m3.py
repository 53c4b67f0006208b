"""Decodes e4m3 codes to BF16, which holds every e4m3 number exactly.

On a CPU, numba kernels decode. A torch dispatch mode that watches every operation while an engine loads weights does
not see them.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def e4m3_numbers(codes: torch.Tensor) -> torch.Tensor:
    """`codes.to(torch.bfloat16)` for float8_e4m3fn of any shape; a transposed matrix stays transposed."""
    if codes.device.type != "cpu":
        return codes.to(torch.bfloat16)
    if codes.dim() == 2 and not codes.is_contiguous():
        return _numbers(codes.t().contiguous()).t()
    return _numbers(codes.contiguous())


def e4m3_scaled(codes_NK: torch.Tensor, scale_PQ: torch.Tensor) -> torch.Tensor:
    """Codes on a CPU times the float32 scale of their 128 x 128 block, rounded once: BF16 [N, K]."""
    # not at the top: numba must not be imported before vLLM's CPU worker has initialised
    from rollout.cpu.e4m3_loops import scaled

    codes, scale = codes_NK.contiguous(), scale_PQ.contiguous()
    values = torch.empty(codes.shape, dtype=torch.bfloat16)
    if codes.numel():
        bits, grid = memory(codes, np.uint8), memory(scale, np.float32)
        halves = memory(values, np.uint16)
        scaled(bits.reshape(codes.shape), number_of_code(), grid.reshape(scale.shape), halves.reshape(codes.shape))
    return values


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    from rollout.cpu.e4m3_loops import look_up  # not at the top, for the same reason

    values = torch.empty(codes.shape, dtype=torch.bfloat16)
    if codes.numel():
        look_up(memory(codes, np.uint8), _bf16_of_code(), memory(values, np.uint16))
    return values


def memory(tensor: torch.Tensor, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """A numpy view of a contiguous tensor with at least one element.

    `Tensor.numpy` is not used: it makes the tensor's storage unresizable, so torch could not free it by resizing.
    """
    interface = {
        "data": (tensor.data_ptr(), False),
        "shape": (tensor.numel(),),
        "typestr": np.dtype(dtype).str,
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


@cache
def number_of_code() -> npt.NDArray[np.float32]:
    """Number of each code, [256]."""
    codes = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(torch.float8_e4m3fn)
    return codes.float().numpy()


@cache
def _bf16_of_code() -> npt.NDArray[np.uint16]:
    """BF16 bits of the number of each code, [256]."""
    return torch.from_numpy(number_of_code()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
