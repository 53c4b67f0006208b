"""Similarity of two visits of a prompt: the share of repeated tokens, and the rank correlation of lengths.

Drafting and planning from history rest on these two observations (RhymeRL, section 3).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from history.types import PastResponse, TokenIds

RUN_TOKENS = 4
"""Length of a run that counts as reused if it occurs in the last visit. Shorter runs match by chance."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def reusable_share(before: Sequence[PastResponse], now: Sequence[PastResponse]) -> float:
    """Share of `now`'s tokens in runs of `RUN_TOKENS` that also occur in `before`, 0..1; 0 without tokens."""
    runs_before = np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *(_runs(past.token_ids) for past in before)]))
    reused = sum(_num_covered(_contained(_runs(response.token_ids), runs_before)) for response in now)
    return reused / max(sum(len(response.token_ids) for response in now), 1)


def rank_correlation(before: Sequence[float], now: Sequence[float]) -> float:
    """Spearman's rank correlation with mean ranks for ties; NaN for fewer than two values or for equal values."""
    if len(before) < 2:
        return float("nan")
    first, second = (_ranks(np.asarray(values, dtype=np.float64)) for values in (before, now))
    if first.std() == 0 or second.std() == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _runs(token_ids: TokenIds) -> npt.NDArray[np.uint64]:
    """Hash each run to 64 bits, [max(T - RUN_TOKENS + 1, 0)]."""
    tokens = np.asarray(token_ids).astype(np.uint64)
    count = max(len(tokens) - RUN_TOKENS + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(RUN_TOKENS):
        hashes = (hashes ^ tokens[offset : offset + count]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _contained(runs: npt.NDArray[np.uint64], known: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Whether each run is among `known`, which ascend. `np.isin` would sort them anew for every response."""
    if not len(known):
        return np.zeros(len(runs), dtype=bool)
    found: npt.NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, runs), len(known) - 1)] == runs
    return found


def _num_covered(starts: npt.NDArray[np.bool_]) -> int:
    """Count the tokens inside the runs that begin at `starts`."""
    covered = np.zeros(len(starts) + RUN_TOKENS - 1, dtype=bool)
    for offset in range(RUN_TOKENS):
        covered[offset : offset + len(starts)] |= starts
    return int(covered.sum()) if len(starts) else 0


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return ranks
