"""The types of planning: groups as forecasts, engines as loads, and the plan. Plain numbers, no prompts.

Invariants of a plan (`check_plan`, asserted in every test of a policy): every planned group is in exactly one queue,
once; there are as many queues as engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout.types import GroupId, PromptGroup

FIRST = -1
"""Step of groups that go before all others: evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupForecast:
    """One group as planning sees it: the expected amount of sampling."""

    group_id: GroupId
    step: int
    """Step for whose batch the group is drawn."""
    num_responses: int
    tokens: float
    """Expected length of one response; positive."""

    @property
    def work(self) -> float:
        """Expected tokens of the whole group."""
        return self.num_responses * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One engine as planning sees it."""

    num_seats: int
    """Responses that the engine decodes at once."""
    speed: float = 1.0
    """Relative to the others; positive."""
    queued_tokens: float = 0.0
    """Expected tokens of the engine's groups so far; divided by `speed`, its predicted free time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The engine at which each group waits, and the order in which an engine starts its groups."""

    queues: tuple[tuple[GroupForecast, ...], ...]
    """[engine], first to start first."""
    shares_work: bool
    """An engine without groups of a step takes groups that wait for another engine."""
    steps_together: int = 1
    """Number of consecutive steps whose groups have equal priority."""

    def over(self, engines: Sequence[int], *, num_engines: int) -> "RolloutPlan":
        """The same plan with the queues under the numbers of `engines`, among `num_engines`; others get no groups."""
        queues = dict(zip(engines, self.queues, strict=True))
        return replace(self, queues=tuple(queues.get(engine, ()) for engine in range(num_engines)))


def plan_first(groups: Sequence[PromptGroup], *, num_engines: int) -> RolloutPlan:
    """A plan without forecasts: the groups go before those of every step, in order, to any engine."""
    forecasts = [
        GroupForecast(
            group_id=group.group_id,
            step=FIRST,
            num_responses=len(group.seeds),
            tokens=float(group.sampling.max_response_tokens),
        )
        for group in groups
    ]
    queues = tuple(tuple(forecasts[engine::num_engines]) for engine in range(num_engines))
    return RolloutPlan(queues=queues, shares_work=True)


def check_plan(plan: RolloutPlan, groups: Sequence[GroupForecast], engines: Sequence[EngineLoad]) -> None:
    """Assert the invariants of a plan of `groups` over `engines`."""
    assert len(plan.queues) == len(engines), f"{len(plan.queues)} queues for {len(engines)} engines"
    placed = [group.group_id for queue in plan.queues for group in queue]
    assert len(placed) == len(set(placed)), "a group is in two places"
    assert set(placed) == {group.group_id for group in groups}, (
        "a group is missing from the plan, or an unknown group is in it"
    )
