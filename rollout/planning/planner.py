"""Decides which prompts are sampled when and by which engine, and which groups are trained on together.

The controller calls `due(step)` when policy version `step` has been published, and passes the result to the pool. It
then waits until `batch(step)` returns the groups to train on. Only the planner knows how far engines may run ahead of
the trainer and how long responses are expected to be.

Invariants, beside those of a plan (`rollout.planning.plan`) and of admission (`rollout.planning.admission`): group
numbers depend only on the step for which a group was drawn, so a resumed run numbers groups like an uninterrupted run;
a prompt is consumed at most as often as it was issued.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from history.lengths.book import LengthBook
from history.types import prompt_key
from rollout.config import PlannerConfig
from rollout.data.order import OrderState, PromptOrder
from rollout.planning.admission import FixedBatches, FlexibleBatches
from rollout.planning.plan import EngineLoad, GroupForecast, RolloutPlan
from rollout.planning.policies import plan
from rollout.seeds import derive_seed
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
    ) -> None:
        """`first_step` is the step at which a resumed run continues; the planner updates `lengths`."""
        self.lengths = lengths
        self._order = order
        self._prompts = prompts
        self._config = config
        self._num_steps = num_steps
        self._prompts_per_step = prompts_per_step
        self._group_size = group_size
        self._sampling = sampling
        self._seed = seed
        self._version = first_step
        self._groups: dict[GroupId, PromptGroup] = {}
        self._drawn: dict[int, tuple[PromptGroup, ...]] = {}
        self._admission = self._new_admission(first_step)

    def _new_admission(self, first_step: int) -> FixedBatches | FlexibleBatches:
        config = self._config
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

    def batch(self, step: int) -> list[GroupId] | None:
        """The groups of step `step`'s batch, in order of admission; None while some are incomplete."""
        return self._admission.batch(step)

    def progress(self, step: int) -> tuple[int, int]:
        """(complete groups of step `step`'s batch, groups of that batch)."""
        return self._admission.progress(step)

    def consumed(self, groups: Sequence[ScoredGroup]) -> None:
        """Learn the lengths of groups that a batch has taken; their prompts are not issued again."""
        for scored in groups:
            group = self._groups.pop(scored.group.group_id)
            self.lengths.observe(prompt_key(group.prompt.prompt_id), group.step, scored.summary.lengths)
        self._order.consume(scored.group.prompt.prompt_id for scored in groups)
        alive = {group.step for group in self._groups.values()}
        self._drawn = {step: groups for step, groups in self._drawn.items() if step in alive or step > self._version}

    # -- called by the pool ------------------------------------------------------------------------

    def started(self, group_id: GroupId) -> None:
        """An engine has begun a group."""
        self._admission.started(group_id, self._version)

    def completed(self, group_id: GroupId) -> None:
        """A group is sampled and scored."""
        self._admission.completed(group_id)

    def remaining(self, group_id: GroupId, emitted: int) -> float:
        """Expected remaining tokens of a group's running response that has `emitted` tokens."""
        estimate = self.lengths.estimate(prompt_key(self._groups[group_id].prompt.prompt_id))
        return min(estimate.remaining(emitted), float(self._sampling.max_response_tokens - emitted))

    # -- checkpoint and metrics --------------------------------------------------------------------

    def state(self) -> OrderState:
        """The part of a checkpoint about the order of prompts; groups in flight are issued again."""
        return self._order.state()

    def metrics(self) -> dict[str, float]:
        """Quality of length forecasts, and admission counters."""
        metrics = {**self.lengths.metrics(), "planner/groups_ahead": float(len(self._groups))}
        if isinstance(self._admission, FlexibleBatches):
            return {**metrics, "planner/waits_for_age": float(self._admission.num_waits)}
        return {**metrics, "planner/head_start": self._admission.head_start}

    # -- inside ------------------------------------------------------------------------------------

    def _planned(self, forecasts: Sequence[GroupForecast], engines: Sequence[EngineLoad]) -> Due:
        tail_engines = min(self._config.tail_engines, len(engines) - 1)  # engines may have been given up
        return Due(
            groups=tuple(self._groups[forecast.group_id] for forecast in forecasts),
            plan=plan(self._config.policy, forecasts, engines, tail_engines=tail_engines),
        )

    def _update_head_start(self) -> None:
        if isinstance(self._admission, FixedBatches):
            self._admission.head_start = self._head_start()

    def _head_start(self) -> float:
        """The configured head start if forecasts are good enough, else 0."""
        correlation = self.lengths.correlation()
        trusted = not math.isnan(correlation) and correlation >= HEAD_START_CORRELATION
        return self._config.head_start if trusted else 0.0

    def _forecasts(self, step: int) -> list[GroupForecast]:
        return [
            GroupForecast(
                group_id=group.group_id,
                step=step,
                num_responses=self._group_size,
                tokens=min(
                    self.lengths.expected(prompt_key(group.prompt.prompt_id)), float(self._sampling.max_response_tokens)
                ),
            )
            for group in self._of(step)
        ]

    def _of(self, step: int) -> tuple[PromptGroup, ...]:
        """The groups of a step, drawn at the first call; steps are drawn in order."""
        if step not in self._drawn:
            seen: Counter[PromptId] = Counter()
            groups = []
            for index, draw in enumerate(self._order.take(self._prompts_per_step)):
                group_id = GroupId(step * self._prompts_per_step + index)
                groups.append(self._group(step, group_id, draw.prompt_id, seen[draw.prompt_id]))
                seen[draw.prompt_id] += 1
            self._drawn[step] = tuple(groups)
            self._groups.update((group.group_id, group) for group in self._drawn[step])
        return self._drawn[step]

    def _group(self, step: int, group_id: GroupId, prompt_id: PromptId, occurrence: int) -> PromptGroup:
        seeds = (
            derive_seed(
                self._seed, purpose="train", step=step, prompt_id=prompt_id, sample=sample, occurrence=occurrence
            )
            for sample in range(self._group_size)
        )
        return PromptGroup(
            group_id=group_id,
            step=step,
            prompt=self._prompts[prompt_id],
            sampling=self._sampling,
            seeds=tuple(seeds),
        )
