"""What planning speaks of: groups as forecasts, engines as loads, and the plan that comes out. Plain numbers, no
prompts.

Invariants of a plan (`check_plan`, asserted in every test of a policy): every group that was to be planned stands in
exactly one queue, once; there are as many queues as engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.types import GroupId, PromptGroup

_FIRST = -1
"""Step of groups that go before all others: evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupForecast:
    """One group as planning sees it: how much there will be to sample."""

    group_id: GroupId
    step: int
    """Step whose batch it is drawn for."""
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
    """Responses that it decodes at once."""
    speed: float = 1.0
    """Relative to the others; positive."""
    queued_tokens: float = 0.0
    """Expected tokens of what it already has: its predicted free time is this over its speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Where each group waits, and in which order an engine takes what waits for it."""

    queues: tuple[tuple[GroupForecast, ...], ...]
    """[engine], first to start first."""
    shares_work: bool
    """An engine that has nothing left of a step takes what waits for another."""
    steps_together: int = 1
    """Steps whose groups have no precedence over each other."""


def plan_first(groups: Sequence[PromptGroup], *, num_engines: int) -> RolloutPlan:
    """A plan without forecasts: the groups go before those of every step, in order, to any engine."""
    forecasts = [
        GroupForecast(
            group_id=group.group_id,
            step=_FIRST,
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
        "a group is missing, or one that nobody asked for is there"
    )
