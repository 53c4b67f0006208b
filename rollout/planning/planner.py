"""Decides which prompts are sampled when, by which engine, and which groups are trained on together.

The controller asks `due(step)` when policy version `step` has been published, hands what comes back to the pool, and
waits until `batch(step)` returns the groups to train on. How far engines may run ahead of the trainer is nobody
else's business; neither is how long responses are expected to be.

Invariants, beside those of a plan (`rollout.planning.plan`) and of admission (`rollout.planning.admission`): group
numbers are a function of the step that a group was drawn for, so a resumed run numbers its groups as an uninterrupted
one; a prompt is consumed at most as often as it was issued.
"""

import math
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
"""With worse forecasts a head start brings 6 % at most and makes responses staler (`benchmarks.planner`, recorded)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What may start now."""

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
        """`first_step` is the one that a resumed run goes on with; `lengths` is kept up to date."""
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
        self._in_batch: frozenset[GroupId] = frozenset()
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

    # -- what the loop asks ------------------------------------------------------------------------

    def due(self, step: int, engines: Sequence[EngineLoad]) -> Due:
        """The groups that may start now that version `step` has been published, planned onto these engines."""
        self._version = step
        if isinstance(self._admission, FixedBatches):
            self._admission.head_start = self._head_start()
        forecasts = self._admission.due(step)
        return Due(
            groups=tuple(self._groups[forecast.group_id] for forecast in forecasts),
            plan=plan(self._config.policy, forecasts, engines, tail_engines=self._config.tail_engines),
        )

    def batch(self, step: int) -> list[GroupId] | None:
        """The groups of step `step`'s batch in order of admission; None: some of them are not complete yet."""
        found = self._admission.batch(step)
        if found is not None:
            self._in_batch = frozenset(found)
        return found

    def progress(self, step: int) -> tuple[int, int]:
        """(groups of step `step`'s batch that are complete, groups that it needs)."""
        return self._admission.progress(step)

    def upcoming(self, step: int) -> list[Prompt]:
        """Prompts whose history should be at hand when `due(step)` comes: those in flight, then those that it
        admits.
        """
        if self._config.policy == "flexible":
            last = step + self._config.overlap
        else:
            last = step + self._config.overlap + (self._config.head_start > 0)
        for ahead in range(step, min(last + 1, self._num_steps)):
            self._of(ahead)
        return [group.prompt for group_id, group in self._groups.items() if group_id not in self._in_batch]

    def consumed(self, groups: Sequence[ScoredGroup]) -> None:
        """These were trained on or dropped: their prompts are not issued again, and their lengths are known."""
        for scored in groups:
            group = self._groups.pop(scored.group.group_id)
            self.lengths.observe(prompt_key(group.prompt.prompt_id), group.step, scored.summary.lengths)
        self._order.consume(scored.group.prompt.prompt_id for scored in groups)
        alive = {group.step for group in self._groups.values()}
        self._drawn = {step: found for step, found in self._drawn.items() if step in alive or step > self._version}

    # -- what the pool tells -----------------------------------------------------------------------

    def started(self, group_id: GroupId) -> None:
        """An engine has taken a group."""
        self._admission.started(group_id, self._version)

    def completed(self, group_id: GroupId) -> None:
        """A group is sampled and scored."""
        self._admission.completed(group_id)

    def remaining(self, group_id: GroupId, emitted: int) -> float:
        """Expected tokens still to come of a group's response that has `emitted` and has not ended."""
        estimate = self.lengths.estimate(prompt_key(self._groups[group_id].prompt.prompt_id))
        return min(estimate.remaining(emitted), float(self._sampling.max_response_tokens - emitted))

    # -- what is kept and watched ------------------------------------------------------------------

    def state(self) -> OrderState:
        """What a checkpoint keeps of the order of prompts; groups in flight are issued again."""
        return self._order.state()

    def metrics(self) -> dict[str, float]:
        """How good forecasts are, and what admission made of them."""
        found = {**self.lengths.metrics(), "planner/groups_ahead": float(len(self._groups))}
        if isinstance(self._admission, FlexibleBatches):
            return {**found, "planner/waits_for_age": float(self._admission.num_waits)}
        return {**found, "planner/head_start": self._admission.head_start}

    # -- inside ------------------------------------------------------------------------------------

    def _head_start(self) -> float:
        """As configured where forecasts are good enough to pick by."""
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
        """The groups drawn for a step; steps are drawn in order."""
        if step not in self._drawn:
            draws = self._order.take(self._prompts_per_step)
            self._drawn[step] = tuple(
                self._group(step, GroupId(step * self._prompts_per_step + index), self._prompts[draw.prompt_id])
                for index, draw in enumerate(draws)
            )
            self._groups.update((group.group_id, group) for group in self._drawn[step])
        return self._drawn[step]

    def _group(self, step: int, group_id: GroupId, prompt: Prompt) -> PromptGroup:
        return PromptGroup(
            group_id=group_id,
            step=step,
            prompt=prompt,
            sampling=self._sampling,
            seeds=tuple(
                derive_seed(self._seed, purpose="train", step=step, prompt_id=prompt.prompt_id, sample=sample)
                for sample in range(self._group_size)
            ),
        )
