"""Which engine takes which groups, in which order: the placement policies, by name.

    static      group i to engine i mod n, in the order of the data: what synchronous systems do
    lpt         longest expected first, each to the engine that is free first (Graham 1969)
    histopipe   RhymeRL, section 4: groups in order of expected length are cut into runs of equal expected cost, one
                an engine; which end the long ones are at changes with every step
    adaptive    as `lpt`, and an engine that has nothing left of a step takes what waits for another
    flexible    as `adaptive`, two steps at a time

All see whole steps and are told nothing of when a step may start (`rollout.planning.admission`).
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rollout.planning.plan import EngineLoad, GroupForecast, RolloutPlan

LENGTH_COST = 1.4
"""Power of its length that a response costs an engine which has only such: long ones leave seats empty, and their
context is long. Simulated; RhymeRL's second tier, more engines for the long ones until ends rise linearly by rank, is
this by rule: searching for that line with forecast ends did worse (0.8 of the speed), because forecasts of the
longest are low."""

Queues = list[list[GroupForecast]]
Policy = Callable[[Sequence[GroupForecast], Sequence[EngineLoad]], Queues]


def static(groups: Sequence[GroupForecast], engines: Sequence[EngineLoad]) -> Queues:
    """Equal counts, in the order of the data."""
    return [list(groups[engine :: len(engines)]) for engine in range(len(engines))]


def longest_first(groups: Sequence[GroupForecast], engines: Sequence[EngineLoad], *, steps_together: int = 1) -> Queues:
    """Steps in order; within a step the longest expected first, each to the engine that is predicted to be free
    first.
    """
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
    """The groups that are expected to be the longest wait for the last `num_tail` engines, by `place` as all others.

    They are so many as to cost those engines their share. What an engine takes when it has nothing left is not
    touched.
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
    """Runs of equal expected cost along the order of expected lengths; ascending over the engines in odd steps."""
    queues: Queues = [[] for _ in engines]
    for step in sorted({group.step for group in groups}):
        of_step = sorted((g for g in groups if g.step == step), key=lambda group: (group.tokens, group.group_id))
        costs = np.array([group.num_responses * group.tokens**LENGTH_COST for group in of_step])
        middles = (np.cumsum(costs) - costs / 2) / costs.sum()
        for group, rank in zip(of_step, (len(engines) * middles).astype(int).tolist(), strict=True):
            queues[rank if step % 2 else len(engines) - 1 - rank].append(group)
    return queues


TOGETHER = 2
"""Steps of which `flexible` starts the longest first."""

POLICIES: dict[str, tuple[Policy, bool]] = {
    "static": (static, False),
    "lpt": (longest_first, False),
    "histopipe": (rank_groups, False),
    "adaptive": (longest_first, True),
    "flexible": (partial(longest_first, steps_together=TOGETHER), True),
}
"""Placement, and whether engines take each other's work."""


def plan(
    policy: str, groups: Sequence[GroupForecast], engines: Sequence[EngineLoad], *, tail_engines: int = 0
) -> RolloutPlan:
    """Place `groups` by the policy of that name; the longest on `tail_engines` engines of their own.

    Raises:
        ValueError: an unknown name; the known ones are listed. Or no engine is left for the others.
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
