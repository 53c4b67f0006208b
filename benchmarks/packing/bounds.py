"""Lower bounds for any assignment of samples, and the duration of a pipeline; independent of the measured code.

Bounds on the number of micro batches: total tokens over the token bound, and Martello and Toth's L2 (Knapsack Problems,
1990, section 8.3). L2 uses that two samples above half of the token bound cannot share a micro batch. Bounds on the
cost of the slowest rank: the mean, the most expensive sample, and the two cheapest of the `ranks + 1` most expensive
samples, since two of these are on the same rank.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def fewest_micro_batches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> int:
    """Lower bound on the micro batches per rank; no sample may be longer than `max_tokens`."""
    sizes = np.sort(np.asarray(lengths, dtype=np.int64))
    sums = np.concatenate([[0], np.cumsum(sizes)])
    total = int(sums[-1])
    bound = -(-total // max_tokens)
    above_half = int(np.searchsorted(sizes, max_tokens / 2, side="right"))
    num_large = len(sizes) - above_half
    for smallest in np.unique(np.concatenate([[0], sizes[:above_half]])):
        first_alone = int(np.searchsorted(sizes, max_tokens - smallest, side="right"))
        first_small = int(np.searchsorted(sizes, smallest, side="left"))
        room = (first_alone - above_half) * max_tokens - (sums[first_alone] - sums[above_half])
        rest = int(sums[above_half] - sums[first_small] - room)
        bound = max(bound, num_large + max(0, -(-rest // max_tokens)))
    return -(-bound // num_ranks)


def least_rank_cost(costs: npt.NDArray[np.float64], num_ranks: int) -> float:
    """Lower bound on the cost of the slowest rank."""
    falling = -np.sort(-costs)
    pair = falling[num_ranks - 1] + falling[num_ranks] if len(costs) > num_ranks else 0.0
    return float(max(costs.sum() / num_ranks, falling[0], pair))


def one_forward_one_backward(costs: Sequence[float], stages: int) -> float:
    """Duration of a 1F1B schedule; micro batches take `costs` on each stage, a third of it for the forward."""
    ends: dict[tuple[str, int, int], float] = {}
    orders = [_stage_order(stage, stages, len(costs)) for stage in range(stages)]
    places, clocks = [0] * stages, [0.0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage in range(stages):
            while places[stage] < len(orders[stage]):
                kind, number = orders[stage][places[stage]]
                needed = _needed(kind, stage, stages, number)
                if needed is not None and needed not in ends:
                    break
                ready = 0.0 if needed is None else ends[needed]
                clocks[stage] = max(clocks[stage], ready) + costs[number] * (1 / 3 if kind == "forward" else 2 / 3)
                ends[kind, stage, number] = clocks[stage]
                places[stage] += 1
    return max(clocks)


def _stage_order(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """Passes of one stage: first forwards only, then forward and backward in turn, then the remaining backwards."""
    ahead = min(stages - stage - 1, count)
    order = [("forward", i) for i in range(ahead)]
    for i in range(ahead, count):
        order += [("forward", i), ("backward", i - ahead)]
    return order + [("backward", i) for i in range(count - ahead, count)]


def _needed(kind: str, stage: int, stages: int, number: int) -> tuple[str, int, int] | None:
    """The pass that must end first; None if there is none."""
    if kind == "forward":
        return ("forward", stage - 1, number) if stage else None
    return ("backward", stage + 1, number) if stage < stages - 1 else ("forward", stage, number)
