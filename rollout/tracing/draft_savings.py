"""What drafts saved, measured: engines that draft against engines of the same run that do not.

Only a run with `history.baseline_engines` has both; everywhere else there is the drafters' own estimate.
"""

from collections.abc import Collection, Sequence

import numpy as np

from rollout.tracing.forwards import Forwards
from rollout.types import ScoredGroup


def seconds_saved(forwards: Sequence[Forwards], groups: Sequence[ScoredGroup], stock: Collection[int]) -> float:
    """Seconds of forwards that the step's tokens would have taken at the stock engines' rate, minus those they took.

    Args:
        forwards: of each engine, by its number; those outside the step's rollout are not counted.
        groups: of the step.
        stock: numbers of the engines that do not draft.

    Returns NaN where one of the two kinds sampled nothing.
    """
    began = min(group.summary.started_at_s for group in groups)
    ended = max(group.summary.finished_at_s for group in groups)
    tokens = np.zeros(len(forwards))
    for group in groups:
        tokens[group.summary.engine_id] += sum(group.summary.lengths)
    busy = np.array([_busy_s(of_engine, began, ended) for of_engine in forwards])
    is_stock = np.isin(np.arange(len(forwards)), list(stock))
    if not tokens[is_stock].sum() or not tokens[~is_stock].sum():
        return float("nan")
    stock_rate_s = busy[is_stock].sum() / tokens[is_stock].sum()
    return float(tokens[~is_stock].sum() * stock_rate_s - busy[~is_stock].sum())


def _busy_s(forwards: Forwards, began: float, ended: float) -> float:
    inside = (forwards["started_at_s"] >= began) & (forwards["started_at_s"] <= ended)
    return float(forwards["seconds"][inside].sum())
