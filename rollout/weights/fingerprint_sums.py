"""Adds up and compares fingerprints of the two sides, made by `rollout.weights.fingerprint`. Pure: no torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rollout.weights.manifest import stack_of

NUM_GROUPS: Final = 64
NUM_VECTORS: Final = 4

Fingerprint = Mapping[str, npt.NDArray[np.float64]]
"""By tensor: sums and sums of squares over the boxes that one rank holds, [2, NUM_VECTORS, NUM_GROUPS]; for a vector
[2, 1, NUM_GROUPS]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lenience:
    """Tensors whose sums may differ more than those of others."""

    stacks: frozenset[str] = frozenset()
    """Names of stacks of experts (`rollout.weights.manifest.stack_of`)."""
    factor: float = 1.0

    def of(self, name: str) -> float:
        """Factor of the bound for a tensor."""
        return self.factor if stack_of(name) in self.stacks else 1.0


def add_up(fingerprints: Iterable[Fingerprint]) -> dict[str, npt.NDArray[np.float64]]:
    """Fingerprint of all ranks together."""
    total: dict[str, npt.NDArray[np.float64]] = {}
    for fingerprint in fingerprints:
        for name, sums in fingerprint.items():
            total[name] = total[name] + sums if name in total else sums.copy()
    return total


def difference(
    actual: Fingerprint, expected: Fingerprint, *, leniency: Callable[[str], float] = lambda name: 1.0
) -> tuple[float, str]:
    """The largest relative difference of a group's sum, and its tensor and group in words.

    A difference is divided by the root of the group's sum of squares plus the mean sum of squares of all groups. So
    rounding stays at some thousandths, even if single rows are large or the terms of a row cancel. The difference is
    also divided by the tensor's `leniency`. A tensor that only one side has counts as 1.
    """
    worst, where = 0.0, ""
    for name in expected.keys() | actual.keys():
        if name not in actual or name not in expected:
            return 1.0, f"{name} is known to one side only"
        sums, squares = expected[name]
        scale = np.sqrt(np.fmax(squares, actual[name][1]) + squares.mean())
        gaps = np.abs(actual[name][0] - sums) / np.maximum(scale, 1e-30)
        gaps = np.nan_to_num(gaps.ravel(), nan=np.inf) / leniency(name)
        group = int(np.argmax(gaps))
        if gaps[group] > worst:
            worst = float(gaps[group])
            where = f"{name}, {group % NUM_GROUPS + 1}. of {NUM_GROUPS} groups of rows"
    return worst, where
