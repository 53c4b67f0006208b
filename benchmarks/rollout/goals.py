"""Ratios between methods of `benchmarks.rollout`, and goals for them."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from benchmarks.harness.record import Goal, Row
from benchmarks.rollout.turns import MEASURED, SAMPLERS

LOWEST_RATIO = 0.95
RESAMPLES = 2000
LEAST_TURNS = 5
"""Fewest turns for a goal; fewer have no interval."""
LOWER = "lower 95 % bound"


def ratios(
    rows: Sequence[Row], kind: str, batch: int, method: str, other: str, sampler: str = SAMPLERS[0]
) -> list[float]:
    """Tokens per CPU second of `method` over those of `other`, for each turn with this sampler."""
    cell = {
        (row["round"], row.get("repeat", 0), row["method"]): float(row["tokens_per_cpu_s"])
        for row in rows
        if (row["history"], row["batch"], row.get("sampler", SAMPLERS[0])) == (kind, batch, sampler)
    }
    decoded = sorted({key[:2] for key in cell})
    return [
        cell[*turn, method] / cell[*turn, other] for turn in decoded if {(*turn, method), (*turn, other)} <= cell.keys()
    ]


def lower_bound(values: Sequence[float]) -> float:
    """Lower 95 % bootstrap bound of the median."""
    draws = np.random.default_rng(0).choice(np.array(values), size=(RESAMPLES, len(values)))
    return float(np.quantile(np.median(draws, axis=1), 0.05))


def goals(rows: Sequence[Row], methods: Sequence[str], batches: Sequence[int]) -> list[Goal]:
    """Goals for the product over each method: lower 95 % bounds of the median ratio over the turns."""
    kind = MEASURED[0]
    found = []
    for sampler in SAMPLERS:
        remark = "" if sampler == SAMPLERS[0] else f", {sampler}'s sampler for both"
        for history, batch, other in product(MEASURED, batches, methods):
            turns = ratios(rows, history, batch, "ours", other, sampler) if other != "ours" else []
            if len(turns) < LEAST_TURNS:
                continue
            bound = {("stock", 1): 2.5, ("stock", 8): 1.5}.get((other, batch), 1.0) if history == kind else LOWEST_RATIO
            name = f"ours over {other}, batch {batch}, {history}{remark}, {LOWER}"
            found.append(Goal(name=name, value=lower_bound(turns), bound=bound, direction="at least", unit="x"))
    return found
