"""Products with signs (`rollout.weights.fingerprint`) on a CPU, straight from 8-bit codes or BF16 numbers.

Shape legend: N rows, K columns; P x Q blocks that a box touches (rows: N x 1).
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from rollout.cpu.e4m3 import memory
from rollout.weights.fingerprint import products_of, random_signs, run_length
from rollout.weights.fingerprint_sums import NUM_VECTORS
from rollout.weights.manifest import Box

MAX_THREADS = 2
"""With more threads torch is faster, because it uses all of them and a loop of `sign_loops` uses one."""

_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16)
_ONE = np.ones((1, 1), dtype=np.float32)


def supports(content: torch.Tensor) -> bool:
    """Whether `code_products` can multiply this matrix, and is the fastest way."""
    on_cpu = content.device.type == "cpu" and torch.get_num_threads() <= MAX_THREADS
    return on_cpu and content.dim() == 2 and content.is_contiguous() and content.dtype in _DTYPES


def value_products(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """`fingerprint.products_of`, by a loop if that is faster."""
    if values.dtype == torch.bfloat16 and supports(values):
        return code_products(values, None, box, shape, block=None)
    return products_of(values, box, shape)


def code_products(
    content_NK: torch.Tensor, scale_PQ: torch.Tensor | None, box: Box, shape: tuple[int, ...], *, block: int | None
) -> torch.Tensor:
    """Products of a box's rows with `fingerprint.column_signs`, float32 [4, N].

    Args:
        content_NK: codes, or BF16 numbers, that `supports` accepts.
        scale_PQ: float32; None for BF16.
        box: the box.
        shape: shape of the whole tensor.
        block: rows and columns that share a scale; None if each row has its own.
    """
    # not at the top: an engine must not import numba before vLLM's CPU worker has initialised
    from rollout.cpu import sign_loops

    products = torch.zeros(NUM_VECTORS, content_NK.shape[0])
    if not content_NK.numel():
        return products
    signs, runs = _signs_and_runs(box.start[1], box.shape[1], shape[1], block)
    out = memory(products, np.float32).reshape(NUM_VECTORS, -1)
    if content_NK.dtype == torch.bfloat16:
        bits = memory(content_NK, np.uint16).reshape(content_NK.shape)
        sign_loops.of_bf16(bits, signs, runs, _ONE[0], out)
        return products
    assert scale_PQ is not None, "codes have scales"
    scale = scale_PQ.contiguous()
    scales = memory(scale, np.float32).reshape(scale.shape)
    of_row = _blocks_of_rows(box.start[0] % (block or 1), box.shape[0], block or 1)
    if content_NK.dtype == torch.int8:
        codes = memory(content_NK, np.int8).reshape(content_NK.shape)
        sign_loops.of_int8(codes, signs, runs, scales, of_row, out)
    else:
        codes = memory(content_NK, np.uint8).reshape(content_NK.shape)
        sign_loops.of_e4m3(codes, signs * sign_loops.E4M3_EXPONENT, runs, scales, of_row, out)
    return products


@lru_cache(maxsize=1024)
def _signs_and_runs(
    left: int, width: int, num_columns: int, block: int | None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Signs of some columns [K], and their runs (`sign_loops`), none across a border between blocks."""
    columns = np.arange(left, left + width)
    of_run = columns // run_length(num_columns)
    of_block = np.zeros_like(columns) if block is None else columns // block - left // block
    begins = np.flatnonzero(np.diff(of_run, prepend=-1) | np.diff(of_block, prepend=-1))
    ends = np.append(begins[1:], width)
    runs = np.stack([begins, ends, of_run[begins] % NUM_VECTORS, of_block[begins]], axis=1)
    return random_signs(num_columns).numpy()[left : left + width].copy(), np.ascontiguousarray(runs)


@lru_cache(maxsize=1024)
def _blocks_of_rows(above: int, num_rows: int, block: int) -> npt.NDArray[np.int64]:
    return (np.arange(num_rows) + above) // block
