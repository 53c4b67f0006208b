"""Compiled kernels of `megatron_rl.batching.balance`: samples to bins (micro batches), bins to ranks.

Samples are numbered longest first. Costs are float64 in tokens (`megatron_rl.batching.cost_model`). Ties go to the
smaller number, so results depend on the arguments only. Kernels call only kernels of their own file, because numba's
cache notices changes of one file.

* `best_fit`: longest sample first, to the fullest bin with room. O(n log max_tokens) by a tree over remaining room.
* `cheapest_fit`: longest sample first, to the cheapest bin with room. O(n log n), because lengths descend: a bin
  without room waits until a sample is short enough.
* `deal`: most expensive bin first, to the cheapest rank with a free seat.
"""

import numpy as np
import numpy.typing as npt

from history.jit import compiled

Longs = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]

_MAX_LEAVES = 1 << 20
"""Leaves of the tree; with more tokens of room, one leaf stands for several sizes."""


@compiled
def group(keys: Longs, num_groups: int) -> tuple[Longs, Longs]:
    """Indices of `keys` [n] by key, stable, and where each group starts [num_groups + 1]."""
    starts = np.zeros(num_groups + 1, dtype=np.int64)
    for key in keys:
        starts[key + 1] += 1
    for i in range(num_groups):
        starts[i + 1] += starts[i]
    ends = starts.copy()
    order = np.empty(len(keys), dtype=np.int64)
    for i in range(len(keys)):
        order[ends[keys[i]]] = i
        ends[keys[i]] += 1
    return order, starts


@compiled
def best_fit(tokens: Longs, max_tokens: int) -> tuple[Longs, int]:
    """The bin of each sample (`tokens` descending) and the number of bins; a longer sample has a bin of its own."""
    shift = 0
    while (max_tokens >> shift) + 1 > _MAX_LEAVES:
        shift += 1
    leaves = 1
    while leaves < (max_tokens >> shift) + 1:
        leaves *= 2
    occupied = np.zeros(2 * leaves, dtype=np.uint8)
    first = np.full(leaves, -1, dtype=np.int64)
    following = np.full(len(tokens), -1, dtype=np.int64)
    room = np.zeros(len(tokens), dtype=np.int64)
    bin_of = np.empty(len(tokens), dtype=np.int64)
    num_bins = 0
    for sample in range(len(tokens)):
        length = tokens[sample]
        leaf = _next_occupied(occupied, leaves, (length + (1 << shift) - 1) >> shift)
        if leaf < 0:
            chosen = num_bins
            num_bins += 1
            room[chosen] = max(max_tokens, length)
        else:
            chosen = first[leaf]
            first[leaf] = following[chosen]
            if first[leaf] < 0:
                _vacate(occupied, leaves + leaf)
        bin_of[sample] = chosen
        room[chosen] -= length
        leaf = room[chosen] >> shift
        if room[chosen] > 0:
            following[chosen] = first[leaf]
            first[leaf] = chosen
            _occupy(occupied, leaves + leaf)
    return bin_of, num_bins


@compiled
def _next_occupied(occupied: npt.NDArray[np.uint8], leaves: int, leaf: int) -> int:
    """The first occupied leaf from `leaf` on; -1 without one."""
    if leaf >= leaves:
        return -1
    node = leaves + leaf
    while not occupied[node]:
        while node & 1:  # a right child: the next leaf is further up
            node >>= 1
        if node == 0:
            return -1
        node += 1
    while node < leaves:
        node *= 2
        if not occupied[node]:
            node += 1
    return node - leaves


@compiled
def _occupy(occupied: npt.NDArray[np.uint8], node: int) -> None:
    while node and not occupied[node]:
        occupied[node] = 1
        node >>= 1


@compiled
def _vacate(occupied: npt.NDArray[np.uint8], node: int) -> None:
    occupied[node] = 0
    node >>= 1
    while node and not (occupied[2 * node] or occupied[2 * node + 1]):
        occupied[node] = 0
        node >>= 1


@compiled
def cheapest_fit(tokens: Longs, costs: Numbers, num_bins: int, max_tokens: int) -> tuple[Longs, bool]:
    """The bin of each sample (`tokens` descending) and whether all found one of `num_bins`."""
    bin_of = np.zeros(len(tokens), dtype=np.int64)
    cost = np.zeros(num_bins)
    fullness = np.full(num_bins, -float(max_tokens))
    """Minus the room."""
    ready = np.arange(num_bins)
    num_ready = num_bins
    waiting = np.empty(num_bins, dtype=np.int64)
    num_waiting = 0
    for sample in range(len(tokens)):
        length = tokens[sample]
        while num_waiting and -fullness[waiting[0]] >= length:
            num_ready = _push(ready, num_ready, cost, _pop(waiting, num_waiting, fullness))
            num_waiting -= 1
        while num_ready and -fullness[ready[0]] < length and not (length > max_tokens and cost[ready[0]] == 0):
            num_waiting = _push(waiting, num_waiting, fullness, _pop(ready, num_ready, cost))
            num_ready -= 1
        if not num_ready:
            return bin_of, False
        chosen = ready[0]
        bin_of[sample] = chosen
        cost[chosen] += costs[sample]
        fullness[chosen] += length
        _sift_down(ready, num_ready, cost)
    return bin_of, True


@compiled
def _comes_first(keys: Numbers, a: int, b: int) -> bool:
    return bool(keys[a] < keys[b] or (keys[a] == keys[b] and a < b))


@compiled
def _sift_down(heap: Longs, size: int, keys: Numbers) -> None:
    """Restore the heap after the key of its top has grown."""
    item = heap[0]
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _comes_first(keys, heap[child + 1], heap[child]):
            child += 1
        if not _comes_first(keys, heap[child], item):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = item


@compiled
def _pop(heap: Longs, size: int, keys: Numbers) -> int:
    top = heap[0]
    heap[0] = heap[size - 1]
    _sift_down(heap, size - 1, keys)
    return int(top)


@compiled
def _push(heap: Longs, size: int, keys: Numbers, item: int) -> int:
    place = size
    while place and _comes_first(keys, item, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = item
    return size + 1


@compiled
def deal(bin_costs: Numbers, order: Longs, num_ranks: int) -> Longs:
    """Bins of each rank, [num_ranks, seats]; `order` holds all bins, most expensive first."""
    per_rank = len(order) // num_ranks
    seats = np.empty((num_ranks, per_rank), dtype=np.int64)
    taken = np.zeros(num_ranks, dtype=np.int64)
    costs = np.zeros(num_ranks)
    heap = np.arange(num_ranks)
    size = num_ranks
    for bin_index in order:
        rank = heap[0]
        seats[rank, taken[rank]] = bin_index
        taken[rank] += 1
        costs[rank] += bin_costs[bin_index]
        if taken[rank] == per_rank:
            _pop(heap, size, costs)
            size -= 1
        else:
            _sift_down(heap, size, costs)
    return seats
