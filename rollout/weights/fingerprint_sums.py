"""Sums over weights of two sides, held against each other. Made by `rollout.weights.fingerprint`. Pure: no torch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

NUM_GROUPS: Final = 64
NUM_VECTORS: Final = 4

Fingerprint = Mapping[str, npt.NDArray[np.float64]]
"""By tensor, of the parts that somebody holds: sums and sums of squares, [2, NUM_VECTORS, NUM_GROUPS] (of a vector
[2, 1, NUM_GROUPS])."""


def add_up(parts: Iterable[Fingerprint]) -> dict[str, npt.NDArray[np.float64]]:
    """Sums of all parts together."""
    found: dict[str, npt.NDArray[np.float64]] = {}
    for part in parts:
        for name, sums in part.items():
            found[name] = found[name] + sums if name in found else sums.copy()
    return found


def difference(
    found: Fingerprint, expected: Fingerprint, *, leniency: Callable[[str], float] = lambda name: 1.0
) -> tuple[float, str]:
    """The largest difference of a group's sum, over what its rows have together; and where it is.

    Differences of a tensor are divided by its `leniency`.
    What rows have together is the root of their sum of squares and of what groups have on average: rounding is some
    thousandths of it, whatever rows stand out and however parts of a row cancel. 1 where a tensor is not in both.
    """
    worst, where = 0.0, ""
    for name in expected.keys() | found.keys():
        if name not in found or name not in expected:
            return 1.0, f"{name} is known to one side only"
        sums, squares = expected[name]
        have = np.sqrt(np.fmax(squares, found[name][1]) + squares.mean())
        gaps = np.abs(found[name][0] - sums) / np.maximum(have, 1e-30)
        gaps = np.nan_to_num(gaps.ravel(), nan=np.inf) / leniency(name)
        group = int(np.argmax(gaps))
        if gaps[group] > worst:
            worst = float(gaps[group])
            where = f"{name}, {group % NUM_GROUPS + 1}. of {NUM_GROUPS} groups of rows"
    return worst, where
