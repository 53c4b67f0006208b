"""The engines for which groups are planned: those that serve, or will serve again. Without Ray.

Planning counts them from 0. The pool numbers all engines of a run, retired ones included.
"""

from collections.abc import Sequence

from rollout.planning.plan import RolloutPlan, plan_first
from rollout.pool.engine_group import EngineGroup
from rollout.types import PromptGroup


def kept_engines(engines: EngineGroup) -> list[int]:
    """Numbers of the engines that are not retired, ascending."""
    retired = engines.retired
    return [engine for engine in range(len(engines)) if engine not in retired]


def plan_over_all(engines: EngineGroup, groups: Sequence[PromptGroup], plan: RolloutPlan | None = None) -> RolloutPlan:
    """A plan over the kept engines as one over all; without a plan, `groups` go before all waiting groups.

    Raises:
        ValueError: `plan` has another number of queues than there are kept engines.
    """
    kept = kept_engines(engines)
    plan = plan or plan_first(groups, num_engines=len(kept))
    return plan.over(kept, num_engines=len(engines))
