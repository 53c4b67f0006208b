"""Numba kernels for CPUs: largest magnitudes, encoding and decoding of BF16 weights, byte for byte equal to torch's.

torch reads and writes its whole argument once for every operation. These loops convert a row to float32, scale, round
and write it while it is in a core's first-level cache, in one thread.

Shape legend: N rows, K columns; P x Q blocks that a box touches. In loops, row n belongs to blocks `of_row[n]`,
columns `edges[q]` up to `edges[q + 1]` to block q.
"""

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from history.jit import compiled
from rollout.cpu.e4m3 import memory, number_of_code
from rollout.weights.format import FP8_BLOCK

BLOCK: Final = FP8_BLOCK
"""Rows and columns of a block."""
MAX_THREADS = 2
"""With more threads torch is faster, because it uses all of them and these loops use one."""

Start = tuple[int, ...]
"""First row and column of a box in the whole tensor; blocks are counted from the tensor's first."""

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Longs = npt.NDArray[np.int64]

_NO_SIGN = np.uint16(0x7FFF)
_INT8_MAX = np.float32(127.0)
_WHOLE = np.float32(12582912.0)
"""1.5 x 2^23: after adding it, a smaller number's lowest bits are the nearest integer, ties to even."""
_E4M3_MAX = np.float32(448.0)
_SMALLEST_NORMAL = np.float32(2.0**-6)
_HALF, _ONE = np.uint32(0x7FFFF), np.uint32(1)
"""Half of the last of e4m3's three mantissa bits, but for a tie; and that bit."""
_MANTISSA = np.uint32(20)
"""Mantissa bits of float32 that e4m3 lacks."""
_NINTHS = np.float32(16384.0)
"""2^14: the lowest bit of a float32 of this size is 2^-9, e4m3's smallest number."""
_OTHER_BIASES = np.uint32(0x46800000 + ((127 - 7) << 3) + 8)
"""Sum of the bits of 2^14, the difference of exponent biases, and the code of 2^-6."""
_TO_BYTE, _SIGN = np.uint32(24), np.uint32(0x80)


@compiled
def largest(bits: Halves, of_row: Longs, edges: Longs, amax: Halves) -> None:
    """Largest magnitude of each block, NaN if it has a NaN. Without sign, BF16 numbers are ordered as their bits.

    Args:
        bits: bits of BF16 weights, [N, K].
        of_row: [N], as above.
        edges: [Q + 1], as above.
        amax: bits of BF16, [P, Q]; zeros on entry, written.
    """
    for n in range(bits.shape[0]):
        for q in range(len(edges) - 1):
            block, most = bits[n, edges[q] : edges[q + 1]], np.uint16(0)
            for k in range(len(block)):
                most = max(most, np.uint16(block[k] & _NO_SIGN))
            amax[of_row[n], q] = max(amax[of_row[n], q], most)


@compiled
def int8_codes(bits: Halves, scales: Floats, codes: Bytes) -> None:
    """Weights divided by their row's scale, rounded half to even.

    Args:
        bits: bits of BF16 weights, [N, K].
        scales: [N].
        codes: bits of int8, [N, K], written.
    """
    row = np.empty(bits.shape[1], dtype=np.float32)
    row_bits = row.view(np.uint32)
    for n in range(bits.shape[0]):
        scale = scales[n]
        for k in range(len(row)):
            row_bits[k] = np.uint32(bits[n, k]) << np.uint32(16)
        for k in range(len(row)):
            row[k] = min(max(row[k] / scale, -_INT8_MAX), _INT8_MAX) + _WHOLE
        for k in range(len(row)):
            codes[n, k] = np.uint8(row_bits[k])


@compiled
def e4m3_codes(bits: Halves, multipliers: Floats, of_row: Longs, edges: Longs, codes: Bytes) -> None:
    """Weights times their block's multiplier, rounded half to even, at most 448.

    Args:
        bits: bits of BF16 weights, [N, K].
        multipliers: [P, Q].
        of_row: [N], as above.
        edges: [Q + 1], as above.
        codes: bits of e4m3, [N, K], written.
    """
    row = np.empty(bits.shape[1], dtype=np.float32)
    low, high = np.empty_like(row), np.empty_like(row)
    row_bits, low_bits, high_bits = row.view(np.uint32), low.view(np.uint32), high.view(np.uint32)
    for n in range(bits.shape[0]):
        for k in range(len(row)):
            row_bits[k] = np.uint32(bits[n, k]) << np.uint32(16)
        for q in range(len(edges) - 1):
            multiplier = multipliers[of_row[n], q]
            block = row[edges[q] : edges[q + 1]]
            for k in range(len(block)):
                block[k] = block[k] * multiplier
        for k in range(len(row)):
            size = abs(row[k])
            low[k] = min(size, _SMALLEST_NORMAL) + _NINTHS
            high[k] = min(max(size, _SMALLEST_NORMAL), _E4M3_MAX)
        for k in range(len(row)):
            # one of `low` and `high` always gives the code of 2^-6, which the constant removes
            tie = np.uint32(np.uint32(high_bits[k] >> _MANTISSA) & _ONE)
            above = np.uint32(np.uint32(high_bits[k] + _HALF + tie) >> _MANTISSA)
            sign = np.uint32(np.uint32(row_bits[k] >> _TO_BYTE) & _SIGN)
            codes[n, k] = np.uint8(np.uint32(above + low_bits[k] - _OTHER_BIASES) | sign)


@compiled
def e4m3_values(codes: Bytes, numbers: Floats, inverses: Floats, of_row: Longs, edges: Longs, values: Floats) -> None:
    """Numbers of codes times their block's inverse multiplier.

    Args:
        codes: bits of e4m3, [N, K].
        numbers: number of each code, [256].
        inverses: [P, Q].
        of_row: [N], as above.
        edges: [Q + 1], as above.
        values: [N, K], written.
    """
    for n in range(codes.shape[0]):
        for q in range(len(edges) - 1):
            inverse = inverses[of_row[n], q]
            block, decoded = codes[n, edges[q] : edges[q + 1]], values[n, edges[q] : edges[q + 1]]
            for k in range(len(decoded)):
                decoded[k] = numbers[block[k]] * inverse


def amax_of(weight_NK: torch.Tensor, start: Start | None) -> torch.Tensor:
    """See `largest`: float32 [P, Q]; without `start` blocks are rows."""
    weight = weight_NK.contiguous()
    of_row, edges = _places(tuple(weight.shape), start)
    amax = torch.zeros(int(of_row[-1]) + 1, len(edges) - 1, dtype=torch.bfloat16)
    largest(_of(weight, np.uint16), of_row, edges, _of(amax, np.uint16))
    return amax.float()


def int8_of(weight_NK: torch.Tensor, scale_N1: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `int8_codes`: int8 [N, K], written to `out` (contiguous) if it is given."""
    weight, scale = weight_NK.contiguous(), scale_N1.contiguous()
    codes = torch.empty(weight.shape, dtype=torch.int8) if out is None else out
    int8_codes(_of(weight, np.uint16), memory(scale, np.float32), _of(codes, np.uint8))
    return codes


def e4m3_of(
    weight_NK: torch.Tensor, multiplier_PQ: torch.Tensor, start: Start | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `e4m3_codes`: float8_e4m3fn [N, K], written to `out` as above; without `start` blocks are rows."""
    weight, multiplier = weight_NK.contiguous(), multiplier_PQ.contiguous()
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn) if out is None else out
    places = _places(tuple(weight.shape), start)
    e4m3_codes(_of(weight, np.uint16), _of(multiplier, np.float32), *places, _of(codes, np.uint8))
    return codes


def values_of(codes_NK: torch.Tensor, inverse_PQ: torch.Tensor, start: Start | None) -> torch.Tensor:
    """See `e4m3_values`: float32 [N, K]; without `start` blocks are rows."""
    codes, inverse = codes_NK.contiguous(), inverse_PQ.contiguous()
    values = torch.empty(codes.shape, dtype=torch.float32)
    places = _places(tuple(codes.shape), start)
    e4m3_values(_of(codes, np.uint8), number_of_code(), _of(inverse, np.float32), *places, _of(values, np.float32))
    return values


def _of(matrix: torch.Tensor, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return memory(matrix, dtype).reshape(matrix.shape)


@lru_cache(maxsize=1024)
def _places(shape: tuple[int, int], start: Start | None) -> tuple[Longs, Longs]:
    """`of_row` and `edges` of a box."""
    rows, columns = shape
    if start is None:
        return np.arange(rows), np.array([0, columns])
    above, before = (first % BLOCK for first in start)
    edges = np.arange(-(-(before + columns) // BLOCK) + 1) * BLOCK - before
    return (np.arange(rows) + above) // BLOCK, edges.clip(0, columns)
