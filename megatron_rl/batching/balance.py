"""Assigns samples to data-parallel ranks and micro batches. Pure arithmetic on lengths.

Every rank gets the same *number* of micro batches, because collectives must match, but not the same number of samples.
With few samples per rank, equal sample counts cost up to half of the time. Samples are placed longest first: on the
fullest micro batch with room if room is scarce, else on the cheapest one. Micro batches are dealt to ranks, most
expensive first. Then the slowest rank exchanges micro batches and samples with faster ranks until ranks differ by
less than `exchange_kernels.TOLERANCE` (`packing_kernels`, `exchange_kernels`).

Number of micro batches: without a pipeline the fewest possible, because each has an overhead. A pipeline of p stages
fills and drains for p - 1 times its most expensive micro batch, so more and smaller ones may be faster. The number with
the smallest `sum + (p - 1) x largest` on the slowest rank is taken, overheads included.

Order of micro batches: small ones at both ends, where the pipeline fills and drains, and the same order on all ranks.
So the i-th micro batches of all ranks have similar costs. With experts spread over data-parallel ranks, the ranks wait
for each other in every layer. Dense models wait only at the optimizer step and gain nothing by the order.

Invariants (checked by one helper in every test)
1. every sample exactly once
2. all ranks have equally many micro batches, at least one unless there are no samples
3. a micro batch holds at most `max_tokens`, or one single longer sample
4. without a pipeline there are as few as best-fit decreasing needs, divided by the ranks and rounded up; with one,
   never fewer
5. the result depends on the arguments only
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron_rl.batching.cost_model import CostModel

Bins = list[list[int]]
"""Indices of samples, bin by bin."""

_SCARCE = 0.98
"""Fill above which placing on the cheapest micro batch runs out of room."""
_CANDIDATES = 3
"""With a pipeline, this many counts of micro batches with the best estimates are tried."""

_Longs = npt.NDArray[np.int64]
_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Samples, longest first, in bins; bins on the seats of ranks."""

    bin_of: _Longs
    """[n]"""
    seats: _Longs
    """[ranks, seats] bin on each seat."""
    time: float
    """Time of the slowest rank, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules:
    """How many ranks share a mini batch, what a micro batch may hold, and what samples cost."""

    num_ranks: int
    """Data-parallel ranks."""
    max_tokens: int
    """Most prompt and response tokens of a micro batch; a longer sample is alone in its own."""
    costs: CostModel
    """Balances ranks and micro batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    """Samples, longest first, [n] each."""

    tokens: _Longs
    costs: _Numbers
    tight: _Longs
    """Bin of each sample by best-fit decreasing, which needs the fewest bins."""


def balance(lengths: Sequence[int], *, num_ranks: int, max_tokens: int, costs: CostModel) -> list[Bins]:
    """Indices of `lengths` (tokens) by rank and micro batch. Micro batches may be empty.

    The first call of a process imports numba; see `load_kernels`.

    Raises ValueError when `num_ranks` or `max_tokens` is not positive, or a length is negative.
    """
    if num_ranks <= 0 or max_tokens <= 0:
        raise ValueError(f"num_ranks {num_ranks} and max_tokens {max_tokens} must both be positive")
    if not lengths:
        return [[] for _ in range(num_ranks)]
    # imported late: trainer ranks need only the types of a batch, not numba
    from megatron_rl.batching.exchange_kernels import exchange
    from megatron_rl.batching.packing_kernels import best_fit, group

    unsorted = np.asarray(lengths, dtype=np.int64)
    if (shortest := int(unsorted.min())) < 0:
        raise ValueError(f"a sample has {shortest} tokens; lengths must not be negative")
    longest = int(unsorted.max())
    order, _ = group(longest - unsorted, longest + 1)
    tokens = unsorted[order]
    sample_costs = costs.sample_costs(tokens)
    rules = PackingRules(num_ranks=num_ranks, max_tokens=min(max_tokens, int(tokens.sum()) + 1), costs=costs)
    tight, num_bins = best_fit(tokens, rules.max_tokens)
    samples = _Samples(tokens=tokens, costs=sample_costs, tight=tight)
    counts = _counts(sample_costs, -(-num_bins // num_ranks), num_ranks=num_ranks, costs=costs)
    best = min((_place(samples, rules, count=count) for count in counts), key=lambda placement: placement.time)
    exchange(tokens, sample_costs, best.bin_of, best.seats, rules.max_tokens, costs.fill_bins)
    return _lists(best, order, sample_costs)


def load_kernels() -> None:
    """Import numba and the compiled kernels, and compile them on first use of the machine. Takes about a second.

    Call it while the process waits anyway. Otherwise the first `balance` does it.
    """
    balance([3, 2, 1], num_ranks=1, max_tokens=4, costs=CostModel(parity_tokens=1))


def _counts(sample_costs: _Numbers, fewest: int, *, num_ranks: int, costs: CostModel) -> list[int]:
    """Numbers of micro batches per rank to try: the fewest, and with a pipeline those with the best estimates."""
    if costs.fill_bins == 0:
        return [fewest]
    total = float(sample_costs.sum()) / num_ranks
    most = max(fewest, -(-len(sample_costs) // num_ranks))
    counts = np.arange(fewest, most + 1)
    slowest = np.maximum(total / counts, _dearest_bin(sample_costs, counts * num_ranks))
    estimates = total + counts * costs.overhead_tokens + costs.fill_bins * (slowest + costs.overhead_tokens)
    liked = counts[np.argsort(estimates, kind="stable")[:_CANDIDATES]].tolist()
    return sorted({fewest, *liked})


def _dearest_bin(sample_costs: _Numbers, num_bins: _Longs) -> _Numbers:
    """Lower bound of the most expensive bin's cost, for samples in descending order of cost.

    Some bin holds k of the first `(k - 1) x bins + 1` samples, and they cost at least as much as the last k of them.
    """
    bounds = np.full(len(num_bins), sample_costs[0])
    sums = np.concatenate([[0.0], np.cumsum(sample_costs)])
    for together in (np.full_like(num_bins, 2), -(-len(sample_costs) // num_bins)):
        ends = np.minimum((together - 1) * num_bins + 1, len(sample_costs))
        enough = (together - 1) * num_bins < len(sample_costs)
        bounds = np.maximum(bounds, np.where(enough, sums[ends] - sums[np.maximum(ends - together, 0)], 0.0))
    return bounds


def _place(samples: _Samples, rules: PackingRules, *, count: int) -> _Placement:
    """`count` micro batches per rank: of similar costs if all samples find room, else those of `samples.tight`."""
    from megatron_rl.batching.packing_kernels import cheapest_fit, deal

    costs = rules.costs
    num_bins = count * rules.num_ranks
    bin_of, fits = samples.tight, False
    if samples.tokens.sum() <= _SCARCE * rules.max_tokens * num_bins:
        bin_of, fits = cheapest_fit(samples.tokens, samples.costs, num_bins, rules.max_tokens)
    bin_of = bin_of if fits else samples.tight.copy()
    bin_costs = np.bincount(bin_of, weights=samples.costs, minlength=num_bins).astype(np.float64)
    dearest_first: _Longs = np.argsort(-bin_costs, kind="stable")
    seats = deal(bin_costs, dearest_first, rules.num_ranks)
    seated = bin_costs[seats]
    times = seated.sum(axis=1) + costs.fill_bins * (seated.max(axis=1) + costs.overhead_tokens)
    return _Placement(bin_of=bin_of, seats=seats, time=float(times.max()) + count * costs.overhead_tokens)


def _lists(placement: _Placement, order: _Longs, sample_costs: _Numbers) -> list[Bins]:
    """Indices by rank and micro batch, small micro batches at both ends."""
    from megatron_rl.batching.packing_kernels import group

    bin_of, seats = placement.bin_of, placement.seats
    num_ranks, per_rank = seats.shape
    bin_costs = np.bincount(bin_of, weights=sample_costs, minlength=seats.size)
    rising = np.take_along_axis(seats, np.argsort(bin_costs[seats], axis=1, kind="stable"), axis=1)
    arranged = np.concatenate([rising[:, 0::2], rising[:, 1::2][:, ::-1]], axis=1).ravel()
    places = np.empty(seats.size, dtype=np.int64)
    places[arranged] = np.arange(seats.size)
    members, starts = group(places[bin_of], seats.size)
    flat, bounds = order[members].tolist(), starts.tolist()
    bins = [flat[start:end] for start, end in pairwise(bounds)]
    return [bins[rank * per_rank : (rank + 1) * per_rank] for rank in range(num_ranks)]
