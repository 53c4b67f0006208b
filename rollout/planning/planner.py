"""Decides which prompts are sampled when and by which engine, and which groups are trained on together.

The controller calls `due(step)` when policy version `step` has been published, and passes the result to the pool. It
then waits until `batch(step)` returns the groups to train on. With dynamic sampling (`rollout.planning.refill`) it asks
for more groups (`refill`) meanwhile. Only the planner knows how far engines may run ahead of the trainer and how long
responses are expected to be.

Invariants: those of a plan (`rollout.planning.plan`), of admission (`rollout.planning.admission`), of dynamic sampling
and of numbers and seeds (`rollout.planning.drawing`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from history.lengths.book import LengthBook
from history.types import prompt_key
from rollout.config import PlannerConfig
from rollout.data.order import OrderState, PromptOrder
from rollout.planning.admission import FixedBatches, FlexibleBatches
from rollout.planning.drawing import GroupDraws
from rollout.planning.plan import EngineLoad, GroupForecast, RolloutPlan
from rollout.planning.policies import plan
from rollout.planning.refill import RefilledBatches, RefillRule, refill_metrics
from rollout.types import GroupId, Prompt, PromptGroup, PromptId, SamplingSpec, ScoredGroup

HEAD_START_CORRELATION = 0.5
"""Least correlation of forecasts for a head start. Below it a head start gains at most 6 % and makes responses staler
(`benchmarks.planner`, recorded)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Groups that may start now, with their plan."""

    groups: tuple[PromptGroup, ...]
    plan: RolloutPlan


class Planner:
    """Turns the endless order of prompts into groups, plans and batches."""

    def __init__(
        self,
        order: PromptOrder,
        prompts: Mapping[PromptId, Prompt],
        *,
        config: PlannerConfig,
        lengths: LengthBook,
        num_steps: int,
        prompts_per_step: int,
        group_size: int,
        sampling: SamplingSpec,
        seed: int,
        first_step: int = 0,
        refill: RefillRule | None = None,
    ) -> None:
        """`first_step` is the step at which a resumed run continues; the planner updates `lengths`.

        With `refill` every batch has `prompts_per_step` groups with signal, as far as the rule allows.
        """
        self.lengths = lengths
        self._config = config
        self._num_steps = num_steps
        self._prompts_per_step = prompts_per_step
        self._group_size = group_size
        self._max_tokens = float(sampling.max_response_tokens)
        self._version = first_step
        self._refill = refill
        self._draws = GroupDraws(
            order=order,
            prompts=prompts,
            prompts_per_step=prompts_per_step,
            most_by_version=0 if refill is None else (config.overlap + 1) * refill.max_groups,
            group_size=group_size,
            sampling=sampling,
            seed=seed,
            first_step=first_step,
        )
        self._upcoming: dict[GroupId, PromptGroup] = {}
        """Groups that `upcoming` has shown and that are not admitted."""
        self._admission = self._new_admission(first_step)

    def _new_admission(self, first_step: int) -> FixedBatches | FlexibleBatches | RefilledBatches:
        config = self._config
        if self._refill is not None:
            return RefilledBatches(
                draw=self._further,
                first_step=first_step,
                num_steps=self._num_steps,
                groups_per_step=self._prompts_per_step,
                max_groups=self._refill.max_groups,
                overlap=config.overlap,
                max_staleness=config.max_staleness,
                is_repeatable=self._refill.is_repeatable,
            )
        if config.policy == "flexible":
            return FlexibleBatches(
                draw=self._forecasts,
                first_step=first_step,
                num_steps=self._num_steps,
                groups_per_step=self._prompts_per_step,
                overlap=config.overlap,
                max_staleness=config.max_staleness,
            )
        return FixedBatches(draw=self._forecasts, num_steps=self._num_steps, overlap=config.overlap)

    # -- called by the loop ------------------------------------------------------------------------

    def due(self, step: int, engines: Sequence[EngineLoad]) -> Due:
        """The groups that may start now that version `step` has been published, planned onto these engines."""
        self._version = step
        self._update_head_start()
        return self._planned(self._admission.due(step), engines)

    def upcoming(self, step: int, engines: Sequence[EngineLoad]) -> Due:
        """What `due` would return for version `step` now: to prepare for it. Nothing is admitted."""
        self._update_head_start()
        return self._planned(self._admission.upcoming(step), engines)

    def refill(self, step: int, engines: Sequence[EngineLoad]) -> Due | None:
        """Further groups that may start now, because those in the pool cannot fill step `step`'s batch."""
        if not isinstance(self._admission, RefilledBatches):
            return None
        admitted = self._admission.refill(step)
        return self._planned(admitted, engines) if admitted else None

    def batch(self, step: int) -> list[GroupId] | None:
        """The groups of step `step`'s batch, in order of admission; None while some are incomplete."""
        return self._admission.batch(step)

    def progress(self, step: int) -> tuple[int, int]:
        """(complete groups of step `step`'s batch, groups of that batch); equal only if it is complete."""
        return self._admission.progress(step)

    def outdated(self, step: int) -> list[GroupId]:
        """Once batch `step` is taken: scored groups that no later batch may take. They leave the pool (`put_back`)."""
        return self._admission.outdated(step) if isinstance(self._admission, RefilledBatches) else []

    def put_back(self, groups: Sequence[ScoredGroup]) -> None:
        """Learn the lengths of groups that are not trained on; their prompts are issued again before all others."""
        self._observe(self._draws.put_back([scored.group.group_id for scored in groups]), groups)

    def consumed(self, groups: Sequence[ScoredGroup]) -> None:
        """Learn the lengths of groups that a batch has taken; their prompts are not issued again."""
        self._observe(self._draws.consume([scored.group.group_id for scored in groups], self._version), groups)

    def limit_overlap(self, most: int | None) -> None:
        """From the next `due` on, engines run at most this many steps ahead; None: as configured.

        Steps that are admitted stay so. Below the configured overlap there is no head start.
        """
        configured = self._config.overlap
        self._admission.overlap = configured if most is None else min(configured, most)

    # -- called by the pool ------------------------------------------------------------------------

    def started(self, group_id: GroupId) -> None:
        """An engine has begun a group."""
        self._admission.started(group_id, self._version)

    def completed(self, scored: ScoredGroup) -> None:
        """A group is sampled and scored."""
        group_id = scored.group.group_id
        if self._refill is not None and isinstance(self._admission, RefilledBatches):
            has_signal, num_tokens = self._refill.has_signal(scored), sum(scored.summary.lengths)
            self._admission.completed(group_id, has_signal=has_signal, num_tokens=num_tokens)
        elif not isinstance(self._admission, RefilledBatches):
            self._admission.completed(group_id)

    def remaining(self, group_id: GroupId, emitted: int) -> float:
        """Expected remaining tokens of a group's running response that has `emitted` tokens."""
        estimate = self.lengths.estimate(prompt_key(self._draws.groups[group_id].prompt.prompt_id))
        return min(estimate.remaining(emitted), self._max_tokens - emitted)

    # -- checkpoint and metrics --------------------------------------------------------------------

    def state(self) -> OrderState:
        """The part of a checkpoint about the order of prompts; groups in flight are issued again."""
        return self._draws.state()

    def metrics(self) -> dict[str, float]:
        """Quality of length forecasts, and admission counters."""
        metrics = {**self.lengths.metrics(), "planner/groups_ahead": float(self._admission.num_ahead)}
        if isinstance(self._admission, RefilledBatches):
            return {**metrics, **refill_metrics(self._admission.counts)}
        if isinstance(self._admission, FlexibleBatches):
            return metrics
        return {**metrics, "planner/head_start": self._admission.head_start}

    @property
    def num_waits(self) -> int | None:
        """Waits for a group at the staleness bound since the start; None for a policy that never waits."""
        return self._admission.num_waits if isinstance(self._admission, FlexibleBatches) else None

    # -- inside ------------------------------------------------------------------------------------

    def _planned(self, forecasts: Sequence[GroupForecast], engines: Sequence[EngineLoad]) -> Due:
        tail_engines = min(self._config.tail_engines, len(engines) - 1)  # engines may have been given up
        return Due(
            groups=tuple(
                self._draws.groups.get(forecast.group_id) or self._upcoming[forecast.group_id] for forecast in forecasts
            ),
            plan=plan(self._config.policy, forecasts, engines, tail_engines=tail_engines),
        )

    def _update_head_start(self) -> None:
        if isinstance(self._admission, FixedBatches):
            self._admission.head_start = self._head_start()

    def _head_start(self) -> float:
        """The configured head start if forecasts are good enough and the overlap is not lowered, else 0."""
        if self._admission.overlap < self._config.overlap:
            return 0.0
        correlation = self.lengths.correlation()
        trusted = not math.isnan(correlation) and correlation >= HEAD_START_CORRELATION
        return self._config.head_start if trusted else 0.0

    def _forecasts(self, step: int) -> list[GroupForecast]:
        return [self._forecast(group, step) for group in self._draws.of_step(step)]

    def _further(self, version: int, steps: Sequence[int], is_admitted: bool) -> list[GroupForecast]:
        """The next groups, and the step in which each is expected to be trained on."""
        groups = self._draws.further(version, len(steps), is_issued=is_admitted)
        self._upcoming = {} if is_admitted else {group.group_id: group for group in groups}
        return [self._forecast(group, step) for group, step in zip(groups, steps, strict=True)]

    def _forecast(self, group: PromptGroup, step: int) -> GroupForecast:
        return GroupForecast(
            group_id=group.group_id,
            step=step,
            num_responses=self._group_size,
            tokens=min(self.lengths.expected(prompt_key(group.prompt.prompt_id)), self._max_tokens),
        )

    def _observe(self, groups: Sequence[PromptGroup], scored: Sequence[ScoredGroup]) -> None:
        for group, one in zip(groups, scored, strict=True):
            self.lengths.observe(prompt_key(group.prompt.prompt_id), group.step, one.summary.lengths)
