"""Thins long series: means of neighbouring points, with the lowest and the highest of them.

Invariants: the lowest and the highest value of a series stay, and its first and last position; a series of at most
`MAX_POINTS` points stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_POINTS = 400
"""Most points that are drawn as they are."""
NUM_BUCKETS = 200
"""Points of a longer series; each stands for neighbouring points, about as many as the others."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinned:
    """A series of N points; both bounds equal the means where nothing was left out."""

    at: Floats
    """[N] mean positions, but the first and the last of the series at both ends."""
    means: Floats
    lows: Floats
    highs: Floats
    is_thinned: bool


def thin(at: Sequence[float] | Floats, values: Sequence[float] | Floats) -> Thinned:
    """At most `MAX_POINTS` points in the order of the given ones, which are not empty and finite."""
    positions, figures = np.asarray(at, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(positions) <= MAX_POINTS:
        return Thinned(at=positions, means=figures, lows=figures, highs=figures, is_thinned=False)
    edges = np.linspace(0, len(positions), NUM_BUCKETS + 1).astype(np.int64)
    counts = np.diff(edges)
    middles = np.add.reduceat(positions, edges[:-1]) / counts
    middles[0], middles[-1] = positions[0], positions[-1]
    return Thinned(
        at=middles,
        means=np.add.reduceat(figures, edges[:-1]) / counts,
        lows=np.minimum.reduceat(figures, edges[:-1]),
        highs=np.maximum.reduceat(figures, edges[:-1]),
        is_thinned=True,
    )
