"""Numba kernels that multiply the rows of a matrix by signs, in one thread; see `rollout.weights.fingerprint`.

A row is converted to float32 and multiplied while it is in a core's first-level cache. Its columns are cut into
*runs*, and every run belongs to one of four parts. The four products of a row are sums and differences of its four
parts (a Hadamard matrix), so each weight is multiplied once and not four times.

Sums inside a run are in float32, in any order: exact for INT8 codes, else off by some 1e-7 of the summed magnitudes.
Sums of runs are in float64.

Importing this module imports numba, which an engine must not do before vLLM's CPU worker has initialised.

Shape legend: N rows, K columns, U runs; P x Q blocks of scales.
"""

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import numba
import numpy as np
import numpy.typing as npt

P = ParamSpec("P")
T = TypeVar("T")

Bytes = npt.NDArray[np.uint8]
Signed = npt.NDArray[np.int8]
Halves = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

E4M3_EXPONENT: Final = np.float32(2.0**120)
"""An e4m3 code, its bits moved to those of a float32, is its number divided by this: the biases are 7 and 127."""

_UPPER = np.uint32(16)
_MAGNITUDE, _TO_MANTISSA = np.uint32(0x7F), np.uint32(20)
_SIGN, _TO_SIGN = np.uint32(0x80), np.uint32(24)


def _compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, compiled at its first call or loaded from the cache; it may add in any order."""
    typed: Callable[P, T] = numba.njit(
        cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
    )(function)
    return typed


@_compiled
def _add_runs(row: Floats, signs: Floats, runs: Longs, scales: Floats, parts: Doubles) -> None:
    """Add each run's product, times the scale of its block, to its part.

    Args:
        row: [K].
        signs: [K].
        runs: first column, end, part and block of each run, [U, 4].
        scales: of the row's blocks, [Q].
        parts: [4], written.
    """
    parts[:] = 0.0
    for u in range(runs.shape[0]):
        values, factors = row[runs[u, 0] : runs[u, 1]], signs[runs[u, 0] : runs[u, 1]]
        total = np.float32(0)
        for k in range(len(values)):
            total += values[k] * factors[k]
        parts[runs[u, 2]] += np.float64(total) * scales[runs[u, 3]]


@_compiled
def _combine(parts: Doubles, products: Floats, n: int) -> None:
    a, b, c, d = parts[0], parts[1], parts[2], parts[3]
    products[0, n] += np.float32(a + b + c + d)
    products[1, n] += np.float32(a - b + c - d)
    products[2, n] += np.float32(a + b - c - d)
    products[3, n] += np.float32(a - b - c + d)


@_compiled
def of_int8(codes: Signed, signs: Floats, runs: Longs, scales: Floats, of_row: Longs, products: Floats) -> None:
    """Add the products of INT8 codes times scales.

    Args:
        codes: [N, K].
        signs: [K].
        runs: see `_add_runs`.
        scales: [P, Q].
        of_row: block of each row, [N].
        products: [4, N], added to.
    """
    row, parts = np.empty(codes.shape[1], dtype=np.float32), np.zeros(4, dtype=np.float64)
    for n in range(codes.shape[0]):
        for k in range(len(row)):
            row[k] = np.float32(codes[n, k])
        _add_runs(row, signs, runs, scales[of_row[n]], parts)
        _combine(parts, products, n)


@_compiled
def of_e4m3(codes: Bytes, signs: Floats, runs: Longs, scales: Floats, of_row: Longs, products: Floats) -> None:
    """Add the products of e4m3 codes times scales; arguments as above, but `signs` times `E4M3_EXPONENT`."""
    row, parts = np.empty(codes.shape[1], dtype=np.float32), np.zeros(4, dtype=np.float64)
    bits = row.view(np.uint32)
    for n in range(codes.shape[0]):
        for k in range(len(row)):
            code = np.uint32(codes[n, k])
            size = np.uint32(np.uint32(code & _MAGNITUDE) << _TO_MANTISSA)
            bits[k] = np.uint32(size | np.uint32(np.uint32(code & _SIGN) << _TO_SIGN))
        _add_runs(row, signs, runs, scales[of_row[n]], parts)
        _combine(parts, products, n)


@_compiled
def of_bf16(bits: Halves, signs: Floats, runs: Longs, scales: Floats, products: Floats) -> None:
    """Add the products of BF16 numbers, given as bits [N, K]; `scales` is [1], and other arguments are as above."""
    row, parts = np.empty(bits.shape[1], dtype=np.float32), np.zeros(4, dtype=np.float64)
    row_bits = row.view(np.uint32)
    for n in range(bits.shape[0]):
        for k in range(len(row)):
            row_bits[k] = np.uint32(bits[n, k]) << _UPPER
        _add_runs(row, signs, runs, scales, parts)
        _combine(parts, products, n)
