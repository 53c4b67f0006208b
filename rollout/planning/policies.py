"""The placement policies by name: which engine samples which groups, in which order.

    static      group i to engine i mod n, in data order, as in synchronous systems
    lpt         longest expected first, each to the engine that is free first (Graham 1969)
    histopipe   RhymeRL, section 4: groups in order of expected length, cut into one run of equal expected cost per
                engine; the direction alternates with every step
    adaptive    as `lpt`, and an engine without groups of a step takes groups that wait for another engine
    flexible    as `adaptive`, two steps at a time

Policies place whole steps; `rollout.planning.admission` decides when a step may start.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rollout.planning.plan import EngineLoad, GroupForecast, RolloutPlan

LENGTH_COST = 1.4
"""Exponent of a response's cost in its length, for an engine with responses of that length only. Long responses leave
seats empty and have long contexts. The value comes from simulation. It stands in for RhymeRL's second tier, which adds
engines for long responses until end times rise linearly by rank. A search for that line with forecast end times reached
0.8 of the speed, because forecasts of the longest responses are too low."""

Queues = list[list[GroupForecast]]
Policy = Callable[[Sequence[GroupForecast], Sequence[EngineLoad]], Queues]


def static(groups: Sequence[GroupForecast], engines: Sequence[EngineLoad]) -> Queues:
    """Equal counts, in the order of the data."""
    return [list(groups[engine :: len(engines)]) for engine in range(len(engines))]


def longest_first(groups: Sequence[GroupForecast], engines: Sequence[EngineLoad], *, steps_together: int = 1) -> Queues:
    """Steps in order; within a step the longest expected group first, each to the engine predicted to be free first."""
    free_at = [(load.queued_tokens / load.speed, engine) for engine, load in enumerate(engines)]
    heapq.heapify(free_at)
    queues: Queues = [[] for _ in engines]
    steps, tokens, ids = (
        np.array([getattr(group, name) for group in groups]) for name in ("step", "tokens", "group_id")
    )
    work = (tokens * np.array([group.num_responses for group in groups])).tolist()
    for index in np.lexsort((ids, -tokens, steps // steps_together)).tolist():
        free, engine = free_at[0]
        queues[engine].append(groups[index])
        heapq.heapreplace(free_at, (free + work[index] / engines[engine].speed, engine))
    return queues


def isolating(place: Policy, num_tail: int) -> Policy:
    """A policy that reserves the last `num_tail` engines for the longest expected groups; `place` places both parts.

    The number of these groups makes the cost per engine equal. Work sharing between engines stays as it is.
    """

    def placed(groups: Sequence[GroupForecast], engines: Sequence[EngineLoad]) -> Queues:
        by_length = sorted(groups, key=lambda group: (-group.tokens, group.group_id))
        costs = np.cumsum([group.num_responses * group.tokens**LENGTH_COST for group in by_length])
        count = int(np.searchsorted(costs, costs[-1] * num_tail / len(engines), side="right")) if groups else 0
        tail = {group.group_id for group in by_length[:count]}
        first = len(engines) - num_tail
        return [
            *place([group for group in groups if group.group_id not in tail], engines[:first]),
            *place([group for group in groups if group.group_id in tail], engines[first:]),
        ]

    return placed


def rank_groups(groups: Sequence[GroupForecast], engines: Sequence[EngineLoad]) -> Queues:
    """Runs of equal expected cost, in order of expected length; ascending over the engines in odd steps."""
    queues: Queues = [[] for _ in engines]
    for step in sorted({group.step for group in groups}):
        of_step = sorted((g for g in groups if g.step == step), key=lambda group: (group.tokens, group.group_id))
        costs = np.array([group.num_responses * group.tokens**LENGTH_COST for group in of_step])
        middles = (np.cumsum(costs) - costs / 2) / costs.sum()
        for group, rank in zip(of_step, (len(engines) * middles).astype(int).tolist(), strict=True):
            queues[rank if step % 2 else len(engines) - 1 - rank].append(group)
    return queues


TOGETHER = 2
"""Number of steps that `flexible` merges: it starts the longest group of all of them first."""

POLICIES: dict[str, tuple[Policy, bool]] = {
    "static": (static, False),
    "lpt": (longest_first, False),
    "histopipe": (rank_groups, False),
    "adaptive": (longest_first, True),
    "flexible": (partial(longest_first, steps_together=TOGETHER), True),
}
"""Placement, and whether engines share waiting groups."""


def plan(
    policy: str, groups: Sequence[GroupForecast], engines: Sequence[EngineLoad], *, tail_engines: int = 0
) -> RolloutPlan:
    """Place `groups` by the named policy; `tail_engines` engines are reserved for the longest expected groups.

    Raises:
        ValueError: the name is unknown (the message lists the known names), or no engine is left for other groups.
    """
    if policy not in POLICIES:
        raise ValueError(f"planner.policy `{policy}` is not one of {', '.join(POLICIES)}")
    place, shares_work = POLICIES[policy]
    if tail_engines >= len(engines):
        raise ValueError(f"{tail_engines} engines for the longest groups leave none of {len(engines)} for the others")
    if tail_engines:
        place = isolating(place, tail_engines)
    queues = tuple(tuple(queue) for queue in place(groups, engines))
    together = TOGETHER if policy == "flexible" else 1
    return RolloutPlan(queues=queues, shares_work=shares_work, steps_together=together)
