"""Numba kernels over e4m3 codes, in one thread.

Importing this module imports numba, which an engine must not do before vLLM's CPU worker has initialised.
"""

import numpy as np
import numpy.typing as npt

from history.jit import compiled
from rollout.weights.format import FP8_BLOCK

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]

_UPPER, _ALMOST_HALF, _ONE = np.uint32(16), np.uint32(0x7FFF), np.uint32(1)
"""Bits of float32 that BF16 drops; just below half of BF16's last bit; and that bit for ties."""


@compiled
def look_up(codes: Bytes, of_code: Halves, values: Halves) -> None:
    """values[i] = of_code[codes[i]]; `of_code` has 256 entries."""
    for i in range(len(codes)):
        values[i] = of_code[codes[i]]


@compiled
def scaled(codes: Bytes, of_code: Floats, scales: Floats, values: Halves) -> None:
    """Numbers of codes times the scale of their block, rounded to BF16, half to even.

    Args:
        codes: bits of e4m3, [N, K].
        of_code: number of each code, [256].
        scales: one for each 128 x 128 codes, [P, Q].
        values: bits of BF16, [N, K], written.
    """
    products = np.empty(FP8_BLOCK, dtype=np.float32)
    bits = products.view(np.uint32)
    for n in range(codes.shape[0]):
        for q in range(scales.shape[1]):
            scale = scales[n // FP8_BLOCK, q]
            block = codes[n, q * FP8_BLOCK : (q + 1) * FP8_BLOCK]
            rounded = values[n, q * FP8_BLOCK : (q + 1) * FP8_BLOCK]
            for k in range(len(block)):
                products[k] = of_code[block[k]] * scale
            for k in range(len(block)):
                odd = np.uint32(np.uint32(bits[k] >> _UPPER) & _ONE)
                rounded[k] = np.uint16(np.uint32(bits[k] + _ALMOST_HALF + odd) >> _UPPER)
