"""Compiled loops for CPUs: largest magnitudes and codes of BF16 weights, and what codes stand for.

Byte for byte what torch makes of them.

torch goes over its argument once for every operation and reads and writes it each time. Here a row is brought to
float32, scaled, rounded and written while it lies in a core's first cache, by one thread.

Shape legend: N rows, K columns; P x Q blocks that a slice touches. In loops, row n belongs to blocks `of_row[n]`,
columns `edges[q]` up to `edges[q + 1]` to block q.
"""

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rollout.cpu.e4m3 import memory, number_of_code
from rollout.cpu.e4m3_loops import compiled
from rollout.weights.format import FP8_BLOCK

BLOCK: Final = FP8_BLOCK
"""Rows and columns of a block."""
MOST_THREADS = 2
"""torch spreads an operation over its threads and these loops do not: with more threads, torch is faster."""

Start = tuple[int, ...]
"""First row and column of a slice in the whole tensor, which blocks are counted from."""

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Longs = npt.NDArray[np.int64]

_NO_SIGN = np.uint16(0x7FFF)
_INT8_MAX = np.float32(127.0)
_WHOLE = np.float32(12582912.0)
"""1.5 x 2^23: added to a smaller number, it leaves the nearest whole one, even in a tie, in the lowest bits."""
_E4M3_MAX = np.float32(448.0)
_SMALLEST_NORMAL = np.float32(2.0**-6)
_HALF, _ONE = np.uint32(0x7FFFF), np.uint32(1)
"""Of the last bit of three."""
_MANTISSA = np.uint32(20)
"""Bits of float32's that e4m3 does not have."""
_NINTHS = np.float32(16384.0)
"""2^14: the lowest bit of a float32 beside it stands for 2^-9, e4m3's smallest number."""
_OTHER_BIASES = np.uint32(0x46800000 + ((127 - 7) << 3) + 8)
"""Of 2^14, of exponents, and the code of 2^-6."""
_TO_BYTE, _SIGN = np.uint32(24), np.uint32(0x80)


@compiled
def largest(bits: Halves, of_row: Longs, edges: Longs, found: Halves) -> None:
    """Largest magnitude of each block, NaN of one with a NaN: without sign, BF16 numbers are ordered as their bits are.

    Args:
        bits: of BF16 weights, [N, K].
        of_row: [N], as above.
        edges: [Q + 1], as above.
        found: bits of BF16, [P, Q], zeros that are raised.
    """
    for n in range(bits.shape[0]):
        for q in range(len(edges) - 1):
            part, most = bits[n, edges[q] : edges[q + 1]], np.uint16(0)
            for k in range(len(part)):
                most = max(most, np.uint16(part[k] & _NO_SIGN))
            found[of_row[n], q] = max(found[of_row[n], q], most)


@compiled
def int8_codes(bits: Halves, scales: Floats, codes: Bytes) -> None:
    """Weights over their row's scale, rounded half to even.

    Args:
        bits: of BF16 weights, [N, K].
        scales: [N].
        codes: int8 by their bits, [N, K], written.
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
        bits: of BF16 weights, [N, K].
        multipliers: [P, Q].
        of_row: [N], as above.
        edges: [Q + 1], as above.
        codes: e4m3 by their bits, [N, K], written.
    """
    row = np.empty(bits.shape[1], dtype=np.float32)
    low, high = np.empty_like(row), np.empty_like(row)
    row_bits, low_bits, high_bits = row.view(np.uint32), low.view(np.uint32), high.view(np.uint32)
    for n in range(bits.shape[0]):
        for k in range(len(row)):
            row_bits[k] = np.uint32(bits[n, k]) << np.uint32(16)
        for q in range(len(edges) - 1):
            multiplier = multipliers[of_row[n], q]
            part = row[edges[q] : edges[q + 1]]
            for k in range(len(part)):
                part[k] = part[k] * multiplier
        for k in range(len(row)):
            size = abs(row[k])
            low[k] = min(size, _SMALLEST_NORMAL) + _NINTHS
            high[k] = min(max(size, _SMALLEST_NORMAL), _E4M3_MAX)
        for k in range(len(row)):
            # of one of the two the code is that of 2^-6
            tie = np.uint32(np.uint32(high_bits[k] >> _MANTISSA) & _ONE)
            above = np.uint32(np.uint32(high_bits[k] + _HALF + tie) >> _MANTISSA)
            sign = np.uint32(np.uint32(row_bits[k] >> _TO_BYTE) & _SIGN)
            codes[n, k] = np.uint8(np.uint32(above + low_bits[k] - _OTHER_BIASES) | sign)


@compiled
def e4m3_values(codes: Bytes, numbers: Floats, inverses: Floats, of_row: Longs, edges: Longs, values: Floats) -> None:
    """Numbers of codes times their block's inverse multiplier.

    Args:
        codes: e4m3 by their bits, [N, K].
        numbers: of each code, [256].
        inverses: [P, Q].
        of_row: [N], as above.
        edges: [Q + 1], as above.
        values: [N, K], written.
    """
    for n in range(codes.shape[0]):
        for q in range(len(edges) - 1):
            inverse = inverses[of_row[n], q]
            found, part = codes[n, edges[q] : edges[q + 1]], values[n, edges[q] : edges[q + 1]]
            for k in range(len(part)):
                part[k] = numbers[found[k]] * inverse


def amax_of(weight_NK: torch.Tensor, start: Start | None) -> torch.Tensor:
    """See `largest`: float32 [P, Q]; without `start` blocks are rows."""
    weight = weight_NK.contiguous()
    of_row, edges = _places(tuple(weight.shape), start)
    found = torch.zeros(int(of_row[-1]) + 1, len(edges) - 1, dtype=torch.bfloat16)
    largest(_of(weight, np.uint16), of_row, edges, _of(found, np.uint16))
    return found.float()


def int8_of(weight_NK: torch.Tensor, scale_N1: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `int8_codes`: int8 [N, K], written to `out` (contiguous) if there is one."""
    weight, scale = weight_NK.contiguous(), scale_N1.contiguous()
    found = torch.empty(weight.shape, dtype=torch.int8) if out is None else out
    int8_codes(_of(weight, np.uint16), memory(scale, np.float32), _of(found, np.uint8))
    return found


def e4m3_of(
    weight_NK: torch.Tensor, multiplier_PQ: torch.Tensor, start: Start | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `e4m3_codes`: float8_e4m3fn [N, K], written to `out` as above; without `start` blocks are rows."""
    weight, multiplier = weight_NK.contiguous(), multiplier_PQ.contiguous()
    found = torch.empty(weight.shape, dtype=torch.float8_e4m3fn) if out is None else out
    places = _places(tuple(weight.shape), start)
    e4m3_codes(_of(weight, np.uint16), _of(multiplier, np.float32), *places, _of(found, np.uint8))
    return found


def values_of(codes_NK: torch.Tensor, inverse_PQ: torch.Tensor, start: Start | None) -> torch.Tensor:
    """See `e4m3_values`: float32 [N, K]; without `start` blocks are rows."""
    codes, inverse = codes_NK.contiguous(), inverse_PQ.contiguous()
    found = torch.empty(codes.shape, dtype=torch.float32)
    places = _places(tuple(codes.shape), start)
    e4m3_values(_of(codes, np.uint8), number_of_code(), _of(inverse, np.float32), *places, _of(found, np.float32))
    return found


def _of(matrix: torch.Tensor, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return memory(matrix, dtype).reshape(matrix.shape)


@lru_cache(maxsize=1024)
def _places(shape: tuple[int, int], start: Start | None) -> tuple[Longs, Longs]:
    """`of_row` and `edges` of a slice."""
    rows, columns = shape
    if start is None:
        return np.arange(rows), np.array([0, columns])
    above, before = (first % BLOCK for first in start)
    edges = np.arange(-(-(before + columns) // BLOCK) + 1) * BLOCK - before
    return (np.arange(rows) + above) // BLOCK, edges.clip(0, columns)
