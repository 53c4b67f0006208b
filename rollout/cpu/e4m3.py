"""e4m3 codes as BF16 numbers, which all of them are.

On a CPU by compiled loops, which a mode of torch's that looks at every operation while an engine loads weights does not
see.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def e4m3_numbers(codes: torch.Tensor) -> torch.Tensor:
    """What `codes.to(torch.bfloat16)` is, for float8_e4m3fn of any shape; a transposed matrix remains one."""
    if codes.device.type != "cpu":
        return codes.to(torch.bfloat16)
    if codes.dim() == 2 and not codes.is_contiguous():
        return _numbers(codes.t().contiguous()).t()
    return _numbers(codes.contiguous())


def e4m3_scaled(codes_NK: torch.Tensor, scale_PQ: torch.Tensor) -> torch.Tensor:
    """Codes on a CPU times their block's scale (float32), rounded once: BF16 [N, K]. Blocks are of 128 x 128 codes."""
    # not above: numba may not be imported before vLLM's CPU worker has initialised
    from rollout.cpu.e4m3_loops import scaled

    codes, scale = codes_NK.contiguous(), scale_PQ.contiguous()
    found = torch.empty(codes.shape, dtype=torch.bfloat16)
    if codes.numel():
        bits, grid = memory(codes, np.uint8), memory(scale, np.float32)
        halves = memory(found, np.uint16)
        scaled(bits.reshape(codes.shape), number_of_code(), grid.reshape(scale.shape), halves.reshape(codes.shape))
    return found


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    from rollout.cpu.e4m3_loops import look_up  # not above, for the same reason

    found = torch.empty(codes.shape, dtype=torch.bfloat16)
    if codes.numel():
        look_up(memory(codes, np.uint8), _bf16_of_code(), memory(found, np.uint16))
    return found


def memory(tensor: torch.Tensor, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """What a contiguous tensor holds, at least one number, in numpy's hands.

    After `Tensor.numpy` torch could not give its memory back.
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
    """What each code stands for, [256]."""
    codes = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(torch.float8_e4m3fn)
    return codes.float().numpy()


@cache
def _bf16_of_code() -> npt.NDArray[np.uint16]:
    """The same in BF16, by its bits."""
    return torch.from_numpy(number_of_code()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
