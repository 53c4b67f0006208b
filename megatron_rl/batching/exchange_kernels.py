"""Compiled local search of `megatron_rl.batching.balance`: the slowest rank exchanges bins and samples with faster
ranks.

Whole bins (micro batches) are swapped first, because that changes neither their number on a rank nor their content.
Single samples are swapped or moved if that comes closer to the goal. The search ends when all ranks are within a
tolerance or when the slowest rank finds no partner. Kernels call only kernels of this file.

Invariants: the time of the slowest rank never grows. Every rank keeps its number of bins. A bin within `max_tokens`
stays within it. The result depends on the arguments only.
"""

from typing import NamedTuple

import numpy as np

from history.jit import compiled
from megatron_rl.batching.packing_kernels import Longs, Numbers

TOLERANCE = 1e-5
"""Ranks whose times differ by less, relative, count as equal."""
_PARTNERS = 16
"""The slowest rank tries this many partners before the search ends."""
_PAIRS = 16_384
"""Most pairs that one exchange compares."""
_REST = 0.25
"""If a swap of bins leaves more than this share of the distance to the goal, swaps of samples are tried too."""
_LEAST_GAIN = 1e-9
"""Relative; smaller gains are rounding errors."""


class _Bins(NamedTuple):
    """Samples and the bins that hold them; kernels change the arrays in place. n: samples."""

    tokens: Longs
    """[n]"""
    costs: Numbers
    """[n]"""
    bin_of: Longs
    """[n]"""
    heads: Longs
    """First sample of each bin; -1 if it is empty."""
    links: Longs
    """[next or previous, n] sample of the same bin."""
    bin_costs: Numbers
    """Sum of costs of each bin."""
    used: Longs
    """Tokens in each bin."""
    max_tokens: int
    """Room of a bin."""
    fill_bins: float
    """Factor of a rank's most expensive bin in its time, in addition to the sum of all bins."""


@compiled
def exchange(tokens: Longs, costs: Numbers, bin_of: Longs, seats: Longs, max_tokens: int, fill_bins: float) -> None:
    """Lower the time of the slowest rank; changes `bin_of` [n] and `seats` [ranks, seats] in place.

    The time of a rank is the cost of its bins plus `fill_bins` times its most expensive bin. The search ends when the
    slowest rank is within `TOLERANCE` of the initial mean, or when no exchange helps it.
    """
    num_ranks = len(seats)
    bin_costs, used = np.zeros(seats.size), np.zeros(seats.size, dtype=np.int64)
    heads = np.full(seats.size, -1, dtype=np.int64)
    links = np.full((2, len(tokens)), -1, dtype=np.int64)
    for sample in range(len(tokens) - 1, -1, -1):
        bin_costs[bin_of[sample]] += costs[sample]
        used[bin_of[sample]] += tokens[sample]
        _link(heads, links, bin_of[sample], sample)
    bins = _Bins(tokens, costs, bin_of, heads, links, bin_costs, used, max_tokens, fill_bins)
    times = np.empty(num_ranks)
    for rank in range(num_ranks):
        times[rank] = _time(bin_costs, seats[rank], fill_bins)
    goal = times.mean() * (1 + TOLERANCE)
    for _ in range(64 + 16 * num_ranks):
        dear = int(np.argmax(times))
        if times[dear] <= goal:
            return
        for attempt in range(_PARTNERS):
            cheap = _partner(times, dear, attempt)
            if times[cheap] >= times[dear]:
                continue
            ceiling = times[dear] * (1 - _LEAST_GAIN)
            slower, a, b = _bin_swap(bin_costs, seats[dear], seats[cheap], fill_bins, ceiling, goal)
            is_swap = slower < ceiling
            if slower > goal + _REST * (times[dear] - goal):
                sample_slower, x, y, target = _sample_swap(bins, seats[dear], seats[cheap], min(slower, ceiling), goal)
                if sample_slower < min(slower, ceiling):
                    _move(bins, x, y, target)
                    is_swap = False
                    slower = sample_slower
            if is_swap:
                seats[dear, a], seats[cheap, b] = seats[cheap, b], seats[dear, a]
            if slower < ceiling:
                times[dear] = _time(bin_costs, seats[dear], fill_bins)
                times[cheap] = _time(bin_costs, seats[cheap], fill_bins)
                break
        else:
            return


@compiled
def _partner(times: Numbers, dear: int, attempt: int) -> int:
    """Rank to exchange with: the fastest first, then ranks at equal distances."""
    if attempt == 0:
        return int(np.argmin(times))
    return (dear + attempt * (len(times) // _PARTNERS + 1)) % len(times)


@compiled
def _time(bin_costs: Numbers, seats: Longs, fill_bins: float) -> float:
    total, dearest = 0.0, 0.0
    for bin_index in seats:
        total += bin_costs[bin_index]
        dearest = max(dearest, bin_costs[bin_index])
    return total + fill_bins * dearest


@compiled
def _dearest_others(bin_costs: Numbers, seats: Longs) -> Numbers:
    """For each seat the cost of the most expensive bin on any other seat."""
    first, second, place = 0.0, 0.0, -1
    for i in range(len(seats)):
        cost = bin_costs[seats[i]]
        if cost > first or place < 0:
            first, second, place = cost, first, i
        elif cost > second:
            second = cost
    others = np.full(len(seats), first)
    others[place] = second
    return others


@compiled
def _bin_swap(
    bin_costs: Numbers, dear: Longs, cheap: Longs, fill_bins: float, ceiling: float, goal: float
) -> tuple[float, int, int]:
    """The swap of two bins that minimises the slower of two ranks: its time and both seats."""
    best, a, b = ceiling, -1, -1
    dear_others, cheap_others = _dearest_others(bin_costs, dear), _dearest_others(bin_costs, cheap)
    dear_sum, cheap_sum = _time(bin_costs, dear, 0.0), _time(bin_costs, cheap, 0.0)
    num_pairs = 0
    for i in range(len(dear)):
        for j in range(len(cheap)):
            num_pairs += 1
            ours, theirs = bin_costs[dear[i]], bin_costs[cheap[j]]
            if ours <= theirs:
                continue
            dear_time = dear_sum - ours + theirs + fill_bins * max(dear_others[i], theirs)
            cheap_time = cheap_sum - theirs + ours + fill_bins * max(cheap_others[j], ours)
            if max(dear_time, cheap_time) < best:
                best, a, b = max(dear_time, cheap_time), i, j
        if best <= goal or num_pairs > _PAIRS:
            break
    return best, a, b


@compiled
def _sample_swap(bins: _Bins, dear: Longs, cheap: Longs, ceiling: float, goal: float) -> tuple[float, int, int, int]:
    """The best exchange of a sample for a smaller one (-1: for none) that keeps bins within `max_tokens`.

    Returns the time of the slower rank, both samples, and the bin that the first goes to.
    """
    tokens, costs, bin_of, bin_costs, used = bins.tokens, bins.costs, bins.bin_of, bins.bin_costs, bins.used
    max_tokens, fill_bins = bins.max_tokens, bins.fill_bins
    best, x, y, target = ceiling, -1, -1, -1
    ours, our_seats = _members(bins.heads, bins.links, dear)
    theirs, their_seats = _members(bins.heads, bins.links, cheap)
    dear_others, cheap_others = _dearest_others(bin_costs, dear), _dearest_others(bin_costs, cheap)
    dear_sum, cheap_sum = _time(bin_costs, dear, 0.0), _time(bin_costs, cheap, 0.0)
    stride = 1 + len(ours) * len(theirs) // _PAIRS
    for i in range(0, len(ours), stride):
        sample, source = ours[i], bin_of[ours[i]]
        if sample < 0 or used[source] > max_tokens:
            continue
        for j in range(len(theirs)):
            other, destination = theirs[j], cheap[their_seats[j]]
            length = 0 if other < 0 else tokens[other]
            change = costs[sample] - (0.0 if other < 0 else costs[other])
            if change <= 0 or used[destination] + tokens[sample] - length > max_tokens:
                continue
            left = max(dear_others[our_seats[i]], bin_costs[source] - change)
            right = max(cheap_others[their_seats[j]], bin_costs[destination] + change)
            slower = max(dear_sum - change + fill_bins * left, cheap_sum + change + fill_bins * right)
            if slower < best:
                best, x, y, target = slower, sample, other, destination
        if best <= goal:
            break
    return best, x, y, target


@compiled
def _members(heads: Longs, links: Longs, seats: Longs) -> tuple[Longs, Longs]:
    """Samples of the bins on `seats`, with -1 after those of each bin, and the seat of each."""
    size = len(seats)
    for bin_index in seats:
        sample = heads[bin_index]
        while sample >= 0:
            size += 1
            sample = links[0, sample]
    samples, their_seats = np.full(size, -1, dtype=np.int64), np.empty(size, dtype=np.int64)
    count = 0
    for seat in range(len(seats)):
        sample = heads[seats[seat]]
        while sample >= 0:
            samples[count], their_seats[count] = sample, seat
            count += 1
            sample = links[0, sample]
        their_seats[count] = seat
        count += 1
    return samples, their_seats


@compiled
def _move(bins: _Bins, x: int, y: int, target: int) -> None:
    """Move sample `x` to bin `target`, and sample `y` (-1: none) from there to the bin of `x`."""
    bin_of, heads, links = bins.bin_of, bins.heads, bins.links
    source = bin_of[x]
    for sample, destination in ((x, target), (y, source)):
        if sample < 0:
            continue
        origin = bin_of[sample]
        before, after = links[1, sample], links[0, sample]
        if before < 0:
            heads[origin] = after
        else:
            links[0, before] = after
        if after >= 0:
            links[1, after] = before
        _link(heads, links, destination, sample)
        bin_of[sample] = destination
        bins.bin_costs[origin] -= bins.costs[sample]
        bins.bin_costs[destination] += bins.costs[sample]
        bins.used[origin] -= bins.tokens[sample]
        bins.used[destination] += bins.tokens[sample]


@compiled
def _link(heads: Longs, links: Longs, bin_index: int, sample: int) -> None:
    """Put a sample first in the list of a bin; `links` [next or previous, n]."""
    links[0, sample], links[1, sample] = heads[bin_index], -1
    if heads[bin_index] >= 0:
        links[1, heads[bin_index]] = sample
    heads[bin_index] = sample
