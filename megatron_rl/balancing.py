"""Places samples on ranks and micro batches: which rank, which forward. Pure arithmetic on lengths.

Every data-parallel rank gets the same *number* of micro batches (collectives must line up), but not the same number
of samples: with few samples a rank, equal counts alone cost up to half of the time. Samples are placed longest
first on the cheapest micro batch that has room; the micro batches are then dealt to the ranks, dearest first to the
cheapest rank. The cost of a sample is that of its linear layers plus that of attention, which grows with its square.

Invariants: every sample exactly once; a micro batch holds at most `max_tokens` unless it holds a single longer
sample; all ranks have equally many micro batches, as few as longest-first placement achieves; the result depends
on the lengths and their order only.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ATTENTION_PARITY_TOKENS = 24_576
"""Length at which attention costs as much as the linear layers: about 6 x hidden size, here 4,096."""

Bins = list[list[int]]
"""Indices of samples, bin by bin."""

_Numbers = npt.NDArray[np.float64]


def balance(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, parity_tokens: int = ATTENTION_PARITY_TOKENS
) -> list[Bins]:
    """Indices of `lengths` (tokens), by rank and micro batch. Some micro batches may be empty; no samples, none at all.

    Raises ValueError when `num_ranks` or `max_tokens` is not positive.
    """
    if num_ranks <= 0 or max_tokens <= 0:
        raise ValueError(f"num_ranks {num_ranks} and max_tokens {max_tokens} must both be positive")
    if not lengths:
        return [[] for _ in range(num_ranks)]
    tokens = np.asarray(lengths, dtype=np.float64)
    costs = tokens * (1.0 + tokens / parity_tokens)
    tight = _best_fit(tokens, max_tokens=max_tokens)
    num_bins = -(-len(tight) // num_ranks) * num_ranks
    balanced = _cheapest_fit(tokens, costs, num_bins=num_bins, max_tokens=max_tokens)
    bins = balanced if balanced is not None else tight + [[] for _ in range(num_bins - len(tight))]
    return _deal(bins, costs, num_ranks=num_ranks)


def _longest_first(tokens: _Numbers) -> list[int]:
    return [int(i) for i in np.argsort(-tokens, kind="stable")]


def _best_fit(tokens: _Numbers, *, max_tokens: int) -> Bins:
    """Best-fit decreasing: few bins, unbalanced; longer samples are alone."""
    room = np.zeros(len(tokens))
    bins: Bins = []
    for sample in _longest_first(tokens):
        opened = room[: len(bins)]
        left = np.where(opened >= tokens[sample], opened, np.inf)
        chosen = int(np.argmin(left)) if len(bins) else 0
        if not len(bins) or np.isinf(left[chosen]):
            chosen = len(bins)
            bins.append([])
            room[chosen] = max_tokens
        bins[chosen].append(sample)
        room[chosen] -= tokens[sample]
    return bins


def _cheapest_fit(tokens: _Numbers, costs: _Numbers, *, num_bins: int, max_tokens: int) -> Bins | None:
    """Longest first into the cheapest of `num_bins` with room; None when a sample finds none."""
    bins: Bins = [[] for _ in range(num_bins)]
    used = np.zeros(num_bins)
    bin_costs = np.zeros(num_bins)
    for sample in _longest_first(tokens):
        fits = (used + tokens[sample] <= max_tokens) | (used == 0)
        if not fits.any():
            return None
        chosen = int(np.argmin(np.where(fits, bin_costs, np.inf)))
        bins[chosen].append(sample)
        used[chosen] += tokens[sample]
        bin_costs[chosen] += costs[sample]
    return bins


def _deal(bins: Bins, costs: _Numbers, *, num_ranks: int) -> list[Bins]:
    """Bins to ranks, dearest first to the cheapest rank that still has a seat; equal counts."""
    per_rank = len(bins) // num_ranks
    ranks: list[Bins] = [[] for _ in range(num_ranks)]
    rank_costs = [0.0] * num_ranks
    bin_costs = [float(costs[samples].sum()) if samples else 0.0 for samples in bins]
    for index in sorted(range(len(bins)), key=lambda i: -bin_costs[i]):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < per_rank), key=lambda r: rank_costs[r])
        ranks[rank].append(bins[index])
        rank_costs[rank] += bin_costs[index]
    return ranks
