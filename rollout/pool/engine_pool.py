"""All engines of a run behind one queue: groups go in, scored groups come out.

Groups are placed whole. `rollout.planning.dispatcher` decides which engine starts which group: an engine is given its
next group when half of the group finds free seats. Seats become free response by response, so the pool asks a full
engine to answer when enough of its responses have ended (`EngineActor.ended_at_least`, `rollout.pool.seat_counts`).
A deterministic run (`whole_step=True`) is the exception: all admitted groups are handed over before the engine samples
its first token, because the composition of a batch must not depend on timing.

A group passes four places (`rollout.pool.group_places`). Only references to tokens pass through the pool. One thread
at a time uses the pool; `run_in_background` lends it to a thread of its own.

Groups survive the death of their engine. Where the engine's actor lives on, its groups return with their tokens and
continue on another engine. Where the actor died too, they begin again at the prompt with the same seeds. If no engine
is left, `revive` restarts one. A group whose tokens were lost with a node is sampled again from its prompt.

An engine without work, while no group waits, may take over a running group of another engine
(`rollout.pool.migration_survey`): the group is aborted there and continues here with its tokens.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import ray

from rollout.failures import (
    CallError,
    EnginesLostError,
    Place,
    ProcessLostError,
    StepLostError,
    TokensLostError,
    brief,
    node_of,
)
from rollout.group_parts import most_parts, num_parts
from rollout.planning.dispatcher import Dispatcher
from rollout.planning.migration import GroupMigration
from rollout.planning.plan import EngineLoad, GroupForecast, RolloutPlan, plan_first
from rollout.pool.background_thread import repeated_in_background
from rollout.pool.callbacks import Batches, OnStart, Progress, ignore_start, tell
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_watch import EngineWatch
from rollout.pool.group_places import Generating, GroupPlaces, Sampled
from rollout.pool.migration_survey import MigrationSurvey
from rollout.pool.scorer_pool import ScorerPool
from rollout.pool.seat_assignment import assign_seats
from rollout.pool.seat_counts import SeatCounts
from rollout.types import TRAIN, ColumnsRef, GroupId, GroupSummary, PromptGroup, ScoredGroup, WorkerEvents

_log = logging.getLogger(__name__)

_POLL_S = 0.2
_CANCEL_TIMEOUT_S = 60.0
"""Longest wait for engines to abort their responses."""
_HOLD_TIMEOUT_S = 600.0
"""Longest wait, without a watch, for the engine of a deterministic run to hold or begin a step."""


class EnginePool:
    """Engines and scorers of a run, driven by the controller."""

    def __init__(
        self,
        engines: EngineGroup,
        scorers: Sequence[ray.actor.ActorHandle],
        *,
        seats_per_engine: int,
        batches: Batches | None = None,
        whole_step: bool = False,
        migration: GroupMigration | None = None,
        revive: Callable[[], None] | None = None,
        watch: EngineWatch | None = None,
        on_start: OnStart = ignore_start,
        scoring_timeout_s: float = math.inf,
    ) -> None:
        """A pool over engines that have just started, or started over (`EngineGroup.start_over`).

        `scorers` are `rollout.rewards.scorer_actor.ScorerActor` handles.

        Without `batches` there is no training, and `take_batch` may not be called. Without `migration` every group
        ends on the engine that began it. `revive` is called when no engine is left and returns when one serves;
        without `revive` that is an error. A scorer that finishes no group for `scoring_timeout_s` hangs. Without
        `watch` nobody notices that, nor that an engine hangs. `on_start` may be called from the pool's thread.
        """
        self.migration = migration or GroupMigration()
        """Moves groups to an engine that has nothing to do."""
        self.num_reissued = 0
        """Groups that began again, or continued on another engine, because their engine had died."""
        self._engines = engines
        self._scorers = ScorerPool(scorers, timeout_s=scoring_timeout_s)
        self._batches = batches
        self._whole_step = whole_step
        self._revive = revive
        self._watch = watch
        self._on_start = on_start
        self._places = GroupPlaces()
        self._seats = SeatCounts(len(engines), seats_per_engine=seats_per_engine)
        self._dispatcher = Dispatcher(len(engines))
        self._incarnations = engines.incarnations
        """Engines as this pool knows them."""
        self._closed: set[int] = set()
        """Lost engines whose queues are closed."""
        self._seat_calls: dict[ray.ObjectRef, tuple[int, int]] = {}
        """By the call, the engine that was asked, and how many of its responses have ended when it answers."""
        self._survey = MigrationSurvey(self.migration, engines, self._dispatcher, self._places)

    @property
    def samples_whole_steps(self) -> bool:
        """Whether the run is deterministic, so that groups of an engine that dies cannot go on."""
        return self._whole_step

    @property
    def has_groups(self) -> bool:
        """Whether any group was admitted and has not been taken."""
        return bool(self._places.groups())

    def loads(self) -> list[EngineLoad]:
        """The work of each engine, as planning sees it: without retired engines."""
        loads = self._dispatcher.loads(self._seats.seats_per_engine)
        return [loads[engine] for engine in self._kept()]

    def _kept(self) -> list[int]:
        """Numbers of the engines that planning sees: those that serve, or will serve again."""
        retired = self._engines.retired
        return [engine for engine in range(len(self._engines)) if engine not in retired]

    def homes(self) -> dict[int, list[PromptGroup]]:
        """By engine, the groups that it samples and those that wait for it, in the order of starting."""
        groups = {group.group_id: group for group in self._places.groups()}
        return {
            engine: [groups[group_id] for group_id in group_ids]
            for engine, group_ids in self._dispatcher.homes().items()
        }

    def planned(self, groups: Sequence[PromptGroup], plan: RolloutPlan | None = None) -> dict[int, list[PromptGroup]]:
        """By engine, the groups that `admit` would queue there; while it has room, it starts a plan's groups itself."""
        by_id = {group.group_id: group for group in groups}
        queues = self._over_all(groups, plan).queues
        return {engine: [by_id[forecast.group_id] for forecast in queue] for engine, queue in enumerate(queues)}

    def _over_all(self, groups: Sequence[PromptGroup], plan: RolloutPlan | None) -> RolloutPlan:
        """A plan over the engines of `loads`, as one over all engines; without a plan, that of `admit`."""
        kept = self._kept()
        plan = plan or plan_first(groups, num_engines=len(kept))
        return plan.over(kept, num_engines=len(self._engines))

    def admit(self, groups: Sequence[PromptGroup], plan: RolloutPlan | None = None) -> None:
        """Queue `groups` as planned for the engines of `loads`, and start those for which there are free seats.

        Without a plan they go before all waiting groups, and the emptiest engine takes the next one.
        """
        self._places.admit(groups)
        self._dispatcher.admit(self._over_all(groups, plan))
        if self._whole_step:
            self._start_whole_step()
        else:
            self._dispatch()

    def _start_whole_step(self) -> None:
        """Start everything that waits, on the only engine of a deterministic run; StepLostError if the engine died."""
        timeout_s = _HOLD_TIMEOUT_S if self._watch is None else self._watch.timeout_s
        self._engines.hold(timeout_s=timeout_s)
        self._check_whole_step()
        entering: list[GroupId] = []
        while (forecast := self._dispatcher.take(0)) is not None:
            entering.append(forecast.group_id)
            self._seats.begin(0, forecast.num_responses)
            self._start(forecast, engine=0)
        # calls may overtake each other on their way, so the engine is told which groups to wait for, in order
        self._engines.release(entering, timeout_s=timeout_s)
        self._check_whole_step()

    def take(self, purpose: str, step: int, *, progress: Progress | None = None) -> list[ScoredGroup]:
        """Wait until every admitted group of (`purpose`, `step`) is scored; they leave the pool, in order of admission.

        Raises:
            RuntimeError: an engine or a scorer died or raised; the error names it and the group.
        """
        wanted = self._places.ids(purpose, step)
        while missing := sum(group_id not in self._places.scored for group_id in wanted):
            tell(progress, len(wanted) - missing, len(wanted))
            self._advance()
        tell(progress, len(wanted), len(wanted))
        return self._places.take(wanted)

    def take_batch(
        self, step: int, *, progress: Progress | None = None, refill: Callable[[], None] | None = None
    ) -> list[ScoredGroup]:
        """Wait until a step's batch is complete (`Batches.batch`); its groups leave the pool, in order of admission.

        `refill` is called whenever groups may have ended and the batch is incomplete; it may admit more.

        Raises:
            RuntimeError: an engine or a scorer died or raised; the error names it and the group.
        """
        assert self._batches is not None, "a pool without `batches` does not train"
        while (wanted := self._batches.batch(step)) is None:
            if refill is not None:
                refill()
            tell(progress, *self._batches.progress(step))
            self._advance()
        tell(progress, len(wanted), len(wanted))
        return self._places.take(wanted)

    def drop(self, group_ids: Sequence[GroupId]) -> list[ScoredGroup]:
        """Scored groups that nobody trains on leave the pool, in the given order."""
        return self._places.take(group_ids)

    @property
    def num_hung(self) -> int:
        """Engines that were ended because they did nothing."""
        return self._engines.num_hung

    @property
    def num_scorer_restarts(self) -> int:
        """Scorers that died or hung, and were restarted."""
        return self._scorers.num_restarts

    @property
    def reward_workers(self) -> WorkerEvents:
        """What happened to the reward workers of all scorers."""
        return self._scorers.events

    @contextmanager
    def run_in_background(self) -> Iterator[None]:
        """While the body runs, engines are given waiting groups, and finished groups are scored.

        Raises:
            RuntimeError: an engine or a scorer died or raised meanwhile; raised at the end of the body.
        """
        with repeated_in_background(self._take_turn, name="pool"):
            yield

    def _take_turn(self) -> bool:
        """Start waiting groups and act on calls that end soon; False if no call is pending."""
        self._dispatch()
        if not self._calls():
            return False
        self._advance(timeout_s=_POLL_S)
        return True

    def cancel(self) -> None:
        """Give up every group: engines abort their responses. The pool is not used afterwards."""
        calls = [*self._places.generating, *self._seat_calls, *self._survey.calls]
        for call in calls:
            ray.cancel(call)
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_CANCEL_TIMEOUT_S)

    def check_integrity(self) -> None:
        """Assert that every group is in exactly one place and that no engine holds more than its seats allow."""
        self._places.check_integrity()
        self._dispatcher.check_integrity()
        self._seats.check_integrity()

    def _dispatch(self) -> None:
        """Start waiting groups until no engine has room; ask full engines to report free seats."""
        self._follow_lost_engines()
        assigned = assign_seats(self._dispatcher, self._seats, self._engines.alive)
        for engine, forecast in assigned.starts:
            self._start(forecast, engine=engine)
        asked = dict(self._seat_calls.values())  # by engine the last question, which is the one for the fewest
        for engine, num_ended in assigned.full.items():
            if engine not in asked or num_ended < asked[engine]:
                call = self._engines.actors[engine].ended_at_least.remote(num_ended)
                self._seat_calls[call] = (engine, num_ended)
        self._survey.ask(self._closed)

    def _start(self, forecast: GroupForecast, *, engine: int) -> None:
        item = self._places.waiting[forecast.group_id]
        group, sampled = item.group, item.sampled
        continued = () if sampled is None else (sampled.summary, *sampled.columns)
        call = self._engines.actors[engine].generate_group.options(num_returns=1 + most_parts(group))
        summary, *columns = call.remote(group, *continued)
        self._places.start(
            group.group_id,
            summary,
            engine=engine,
            columns=tuple(map(ColumnsRef, columns)),
            incarnation=self._engines.incarnations[engine],
        )
        self._on_start(group, engine)
        if self._batches is not None and group.purpose == TRAIN:
            self._batches.started(group.group_id)

    def _calls(self) -> list[ray.ObjectRef]:
        """All remote calls that have not ended."""
        return [*self._places.generating, *self._places.scoring, *self._seat_calls, *self._survey.calls]

    def _advance(self, timeout_s: float | None = None) -> None:
        """Wait for calls, at most `timeout_s`, and act on those that have ended."""
        self._follow_lost_engines()
        calls = self._calls()
        if not calls and not self._engines.alive and self._revive is not None:
            self._revive()
            self._dispatch()
            return
        if not calls and not self._engines.alive:
            raise EnginesLostError(
                f"no engine is left, and {len(self._places.waiting)} groups wait: {self._engines.loss_reason(0)}",
                Place(role="engine", ranks=self._engines.lost),
            )
        if not calls:
            raise RuntimeError(
                f"nothing is being sampled, and {len(self._places.waiting)} groups wait for a batch that needs more"
            )
        if self._watch is not None:
            timeout_s = min(self._watch.look_every_s, timeout_s or self._watch.look_every_s)
        ready, _ = ray.wait(calls, num_returns=1, timeout=timeout_s, fetch_local=False)
        more, _ = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)
        for ref in {*ready, *more}:
            if ref in self._survey.calls:
                self._answer_survey()
            elif ref in self._seat_calls:
                self._report_seats(ref)
            elif ref in self._places.generating:
                self._finish_generating(ref)
            elif ref in self._places.scoring:
                self._finish_scoring(ref)
            # else the call went to an engine whose death another call of this round has reported
        self._scorers.check()
        if self._watch is not None:
            self._watch.look({item.engine for item in self._places.generating.values()} - self._closed)
        self._dispatch()

    def _answer_survey(self) -> None:
        """An engine has reported its running groups; one of them may move."""
        source = self._survey.engine
        try:
            self._survey.answered()
        except ray.exceptions.RayActorError as error:
            self._lose(source, error)
        except ray.exceptions.RayError as error:
            raise _failed(source, "in_flight", error) from error

    def _report_seats(self, ref: ray.ObjectRef) -> None:
        engine, _ = self._seat_calls.pop(ref)
        try:
            num_ended: int = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            self._lose(engine, error)
            return
        except ray.exceptions.RayError as error:
            raise _failed(engine, "ended_at_least", error) from error
        self._seats.report(engine, num_ended)

    def _forget_seat_calls(self, engine: int) -> None:
        """What an engine was asked about free seats counts responses that it will not end."""
        self._seat_calls = {ref: asked for ref, asked in self._seat_calls.items() if asked[0] != engine}

    def _take_back_seats(self, item: Generating) -> None:
        """A group never reached its engine."""
        if self._has_seats(item):
            self._seats.take_back(item.engine, len(item.group.seeds))
            self._forget_seat_calls(item.engine)

    def _has_seats(self, item: Generating) -> bool:
        """Whether the seats of a group count still: not if its engine was lost since, so that they were reset."""
        return item.engine not in self._closed and self._engines.incarnations[item.engine] == item.incarnation

    def _lose(self, engine: int, error: Exception) -> None:
        """Mark an engine as lost; StepLostError in a deterministic run."""
        self._engines.mark_lost(engine, brief(error))
        self._check_whole_step(error)
        self._follow_lost_engines()

    def _check_whole_step(self, error: Exception | None = None) -> None:
        """Raise StepLostError if the engine of a deterministic run is lost; `error` says so first."""
        if self._whole_step and (lost := self._engines.lost):
            raise StepLostError(
                f"engine {lost[0]} died, and a deterministic run samples the whole step again: "
                f"{self._engines.loss_reason(lost[0])}",
                Place(role="engine", ranks=lost, node="" if error is None else node_of(error)),
            ) from error

    def _check_tokens(self, group_id: GroupId, error: Exception) -> None:
        """Say that a group's tokens are lost; StepLostError in a deterministic run, whose groups share forwards."""
        why = f"the tokens of group {group_id} were lost with a node"
        if self._whole_step:
            raise StepLostError(
                f"{why}, and a deterministic run samples the whole step again", Place(role="engine")
            ) from error
        _log.warning("%s; it is sampled again", why)

    def _lose_caller(self, item: Generating, error: Exception) -> None:
        """The engine of a group has died; nothing if another one has taken its number since."""
        if self._engines.incarnations[item.engine] == item.incarnation:
            self._lose(item.engine, error)
        else:
            self._follow_lost_engines()

    def _follow_lost_engines(self) -> None:
        """Close the queues of engines that are lost, and open those of engines that serve again.

        An engine may have been lost and replaced since the last call.
        """
        lost, now = set(self._engines.lost), self._engines.incarnations
        replaced = {engine for engine, known in enumerate(self._incarnations) if now[engine] != known}
        self._incarnations = now
        for engine in (lost | replaced) - self._closed:
            self._dispatcher.close(engine)
            self._forget_seat_calls(engine)
            self._seats.reset(engine)
            self._survey.lost(engine)
        for engine in (self._closed | replaced) - lost:
            self._dispatcher.open(engine)
        self._closed = lost

    def _finish_generating(self, ref: ray.ObjectRef) -> None:
        """Have a finished group scored; an interrupted group waits again."""
        item = self._places.generating[ref]
        group_id = item.group.group_id
        try:
            summary: GroupSummary = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            self.migration.returned(group_id, resumable=False)
            self._lose_caller(item, error)
            self._reissue(ref, group_id, None)
            return
        except ray.exceptions.ObjectLostError as error:  # tokens to continue were on a lost node: the call never began
            self.migration.returned(group_id, resumable=False)
            self._check_tokens(group_id, error)
            self._take_back_seats(item)
            self._reissue(ref, group_id, None)
            return
        except ray.exceptions.RayError as error:
            raise _failed(item.engine, f"group {group_id}", error) from error
        sampled = Sampled(summary=summary, columns=item.columns[: num_parts(summary.lengths)])
        target = self.migration.returned(group_id, resumable=summary.is_unfinished and not summary.fault)
        if summary.fault:
            self._lose_caller(item, ProcessLostError(summary.fault))
            if summary.is_unfinished:
                self._reissue(ref, group_id, sampled)
                return
        elif self._has_seats(item):
            self._seats.returned(item.engine, len(item.group.seeds))
        if target is not None:
            self._places.interrupt(ref, sampled)
            self._dispatcher.requeue(group_id, at=target)
            return
        self._dispatcher.finish(group_id)
        call, scorer = self._scorers.submit(item.group, sampled.columns)
        self._places.submit(ref, call, sampled, scorer=scorer)

    def _reissue(self, ref: ray.ObjectRef, group_id: GroupId, sampled: Sampled | None) -> None:
        """A group of a lost engine waits again."""
        self.num_reissued += 1
        self._places.interrupt(ref, sampled)
        self._dispatcher.requeue(group_id)

    def _finish_scoring(self, ref: ray.ObjectRef) -> None:
        try:
            scored = self._scorers.finish(ref, self._places.scoring[ref])
        except TokensLostError as error:
            group = self._places.lose(ref)
            self._check_tokens(group.group_id, error)
            self.num_reissued += 1
            self._dispatcher.admit(self._over_all([group], None))
            return
        self._places.complete(ref, scored)
        if self._batches is not None and scored.group.purpose == TRAIN:
            self._batches.completed(scored)


def _failed(engine: int, action: str, error: Exception) -> CallError:
    place = Place(role="engine", ranks=(engine,), node=node_of(error))
    return CallError(f"engine {engine}: {action} failed: {brief(error)}", place)
