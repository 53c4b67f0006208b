"""What becomes of a group whose call has ended.

    the call of an engine
        the engine's actor died                                it waits again, and begins at the prompt
        tokens to continue were lost with a node               the same; the call never began
        vLLM died inside a living actor                        it waits again, and continues with its tokens
        it was aborted, because it migrates                    the same, for the idle engine only
        all its responses ended, also if vLLM died since       it is scored
    the call of a scorer
        its tokens were lost with a node                       it waits again before all others, from the prompt
        it is scored                                           it stays until somebody takes it

Every other error ends the run and names the group.
"""

from dataclasses import dataclass, field

import ray

from rollout.failures import ProcessLostError, TokensLostError
from rollout.group_parts import num_parts
from rollout.planning.dispatcher import Dispatcher
from rollout.planning.migration import GroupMigration
from rollout.pool.callbacks import Batches
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_losses import EngineLosses
from rollout.pool.group_places import GroupPlaces, Sampled
from rollout.pool.kept_engines import plan_over_all
from rollout.pool.scorer_pool import ScorerPool
from rollout.types import TRAIN, GroupSummary


@dataclass(slots=True, kw_only=True)
class GroupReturns:
    """Acts on calls of groups that have ended; the fields are the pool's. All methods mutate."""

    engines: EngineGroup
    places: GroupPlaces
    dispatcher: Dispatcher
    migration: GroupMigration
    losses: EngineLosses
    scorers: ScorerPool
    batches: Batches | None
    """Told which groups for training are complete."""
    num_reissued: int = field(default=0, init=False)
    """Groups that began again, or continued on another engine, because an engine or a node was lost."""

    def generated(self, call: ray.ObjectRef) -> None:
        """The call of an engine for a group has ended: the group is scored, or waits again.

        Raises:
            CallError: the engine raised.
            StepLostError: the engine or the tokens are lost, in a deterministic run.
        """
        item = self.places.generating[call]
        group_id = item.group.group_id
        try:
            summary: GroupSummary = ray.get(call)
        except ray.exceptions.ObjectLostError as error:  # tokens to continue were on a lost node: the call never began
            self.migration.returned(group_id, resumable=False)
            self.losses.check_tokens(group_id, error)
            self.losses.take_back_seats(item)
            self._reissue(call)
            return
        except ray.exceptions.RayError as error:
            self.migration.returned(group_id, resumable=False)
            self.losses.call_failed(item.engine, item.incarnation, f"group {group_id}", error)
            self._reissue(call)
            return
        sampled = Sampled(summary=summary, columns=item.columns[: num_parts(summary.lengths)])
        target = self.migration.returned(group_id, resumable=summary.is_unfinished and not summary.fault)
        if summary.fault:
            self.losses.died(item.engine, item.incarnation, ProcessLostError(summary.fault))
            if summary.is_unfinished:
                self._reissue(call, sampled)
                return
        else:
            self.losses.free_seats(item)
        if target is not None:
            self.places.interrupt(call, sampled)
            self.dispatcher.requeue(group_id, at=target)
            return
        self.dispatcher.finish(group_id)
        scoring, scorer = self.scorers.submit(item.group, sampled.columns)
        self.places.submit(call, scoring, sampled, scorer=scorer)

    def scored(self, call: ray.ObjectRef) -> None:
        """The call of a scorer has ended: the group is complete, or waits again.

        Raises:
            PlacedError: see `ScorerPool.finish`; the tokens of a group may be lost, but not in a deterministic run.
        """
        try:
            scored = self.scorers.finish(call, self.places.scoring[call])
        except TokensLostError as error:
            group = self.places.lose(call)
            self.losses.check_tokens(group.group_id, error)
            self.num_reissued += 1
            self.dispatcher.admit(plan_over_all(self.engines, [group]))
            return
        self.places.complete(call, scored)
        if self.batches is not None and scored.group.purpose == TRAIN:
            self.batches.completed(scored)

    def _reissue(self, call: ray.ObjectRef, sampled: Sampled | None = None) -> None:
        """A group of a lost engine waits again."""
        self.num_reissued += 1
        group_id = self.places.generating[call].group.group_id
        self.places.interrupt(call, sampled)
        self.dispatcher.requeue(group_id)
