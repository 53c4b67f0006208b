"""Measured savings of drafts: drafting engines compared with baseline engines of the same run.

Only a run with `history.baseline_engines` has both kinds; other runs have only the drafters' estimate.
"""

from collections.abc import Collection, Sequence

import numpy as np

from rollout.tracing.forwards import Forwards
from rollout.types import ScoredGroup


def seconds_saved(
    forwards: Sequence[Forwards],
    groups: Sequence[ScoredGroup],
    baseline: Collection[int],
    *,
    earlier_s: Sequence[float],
) -> float:
    """Seconds of forwards that drafts saved: the step's drafted tokens at the baseline engines' rate, minus measured.

    Args:
        forwards: of each engine, by its number; forwards outside the step's rollout are not counted.
        groups: of the step.
        baseline: numbers of the engines that do not draft.
        earlier_s: [engines] wall clock at the start of the newest forward before `forwards`; -inf without one.

    Returns NaN where drafting or baseline engines sampled nothing. So it does where forwards are missing: a group began
    before them, as in a run that samples ahead, or an engine that sampled has none.
    """
    if any(group.summary.started_at_s <= earlier_s[group.summary.engine_id] for group in groups):
        return float("nan")
    began = min(group.summary.started_at_s for group in groups)
    ended = max(group.summary.finished_at_s for group in groups)
    tokens = np.zeros(len(forwards))
    for group in groups:
        tokens[group.summary.engine_id] += sum(group.summary.lengths)
    busy = np.array([_busy_s(of_engine, began, ended) for of_engine in forwards])
    is_baseline = np.isin(np.arange(len(forwards)), list(baseline))
    if not tokens[is_baseline].sum() or not tokens[~is_baseline].sum() or not busy[tokens > 0].all():
        return float("nan")
    baseline_rate_s = busy[is_baseline].sum() / tokens[is_baseline].sum()
    return float(tokens[~is_baseline].sum() * baseline_rate_s - busy[~is_baseline].sum())


def _busy_s(forwards: Forwards, began: float, ended: float) -> float:
    inside = (forwards["started_at_s"] >= began) & (forwards["started_at_s"] <= ended)
    return float(forwards["seconds"][inside].sum())
