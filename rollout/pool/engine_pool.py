"""All engines of a run behind one queue: groups go in, scored groups come out.

Groups are placed whole. `rollout.planning.dispatcher` decides which engine starts which group: an engine is given its
next group when half of the group finds free seats. Seats become free response by response, so the pool asks a full
engine to answer when enough of its responses have ended (`EngineActor.ended_at_least`, `rollout.pool.seat_counts`).
A deterministic run (`whole_step=True`) is the exception: all admitted groups are handed over before the engine samples
its first token, because the composition of a batch must not depend on timing.

A group passes four places (`rollout.pool.group_places`). `rollout.pool.group_returns` says what becomes of a group
whose call has ended. Only references to tokens pass through the pool.

Groups survive the death of their engine (`rollout.pool.engine_losses`). Where the engine's actor lives on, its groups
return with their tokens and continue on another engine. Where the actor died too, they begin again at the prompt with
the same seeds. If no engine is left, `revive` restarts one. A group whose tokens were lost with a node is sampled again
from its prompt.

An engine without work, while no group waits, may take over a running group of another engine
(`rollout.pool.migration_survey`): the group is aborted there and continues here with its tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import ray

from rollout.failures import EnginesLostError, Place
from rollout.group_parts import most_parts
from rollout.planning.dispatcher import Dispatcher
from rollout.planning.migration import GroupMigration
from rollout.planning.plan import EngineLoad, GroupForecast, RolloutPlan
from rollout.pool.background_thread import repeated_in_background
from rollout.pool.callbacks import Batches, OnStart, Progress, ignore_start, tell
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_losses import EngineLosses
from rollout.pool.engine_watch import EngineWatch
from rollout.pool.group_places import GroupPlaces
from rollout.pool.group_returns import GroupReturns
from rollout.pool.kept_engines import kept_engines, plan_over_all
from rollout.pool.migration_survey import MigrationSurvey
from rollout.pool.scorer_pool import ScorerPool
from rollout.pool.seat_assignment import assign_seats
from rollout.pool.seat_counts import SeatCounts
from rollout.pool.seat_questions import SeatQuestions
from rollout.types import TRAIN, ColumnsRef, GroupId, PromptGroup, ScoredGroup, WorkerEvents

_POLL_S = 0.2
_CANCEL_TIMEOUT_S = 60.0
"""Longest wait for engines to abort their responses."""
_HOLD_TIMEOUT_S = 600.0
"""Longest wait, without a watch, for the engine of a deterministic run to hold or begin a step."""


class EnginePool:
    """Engines and scorers of a run, driven by the controller.

    Invariants of threads: one thread at a time uses the pool and its parts, so they have no locks. In
    `run_in_background` that is the pool's thread. The body then calls no method of the pool, and the thread has ended
    when its context is left. Only `EngineGroup` is shared meanwhile: the body may mark engines as lost and replace
    them, and the pool acts on that in `EngineLosses.follow`. The pool's thread never calls `revive`, because the
    trainer works. `Batches` and `on_start` are called in the thread that uses the pool.
    """

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
        `watch` nobody notices that, nor that an engine hangs.
        """
        self.migration = migration or GroupMigration()
        """Moves groups to an engine that has nothing to do."""
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
        self._seat_questions = SeatQuestions(engines, self._seats)
        self._survey = MigrationSurvey(self.migration, engines, self._dispatcher, self._places)
        self._losses = EngineLosses(
            engines=engines,
            dispatcher=self._dispatcher,
            seats=self._seats,
            seat_questions=self._seat_questions,
            survey=self._survey,
            whole_step=whole_step,
        )
        self._returns = GroupReturns(
            engines=engines,
            places=self._places,
            dispatcher=self._dispatcher,
            migration=self.migration,
            losses=self._losses,
            scorers=self._scorers,
            batches=batches,
        )

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
        return [loads[engine] for engine in kept_engines(self._engines)]

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
        queues = plan_over_all(self._engines, groups, plan).queues
        return {engine: [by_id[forecast.group_id] for forecast in queue] for engine, queue in enumerate(queues)}

    def admit(self, groups: Sequence[PromptGroup], plan: RolloutPlan | None = None) -> None:
        """Queue `groups` as planned for the engines of `loads`, and start those for which there are free seats.

        Without a plan they go before all waiting groups, and the emptiest engine takes the next one.
        """
        self._places.admit(groups)
        self._dispatcher.admit(plan_over_all(self._engines, groups, plan))
        if self._whole_step:
            self._start_whole_step()
        else:
            self._dispatch()

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
    def num_reissued(self) -> int:
        """Groups that began again, or continued on another engine, because an engine or a node was lost."""
        return self._returns.num_reissued

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

    def cancel(self) -> None:
        """Give up every group: engines abort their responses. The pool is not used afterwards."""
        calls = [*self._places.generating, *self._seat_questions.calls, *self._survey.calls]
        for call in calls:
            ray.cancel(call)
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_CANCEL_TIMEOUT_S)

    def check_integrity(self) -> None:
        """Assert that every group is in exactly one place and that no engine holds more than its seats allow."""
        self._places.check_integrity()
        self._dispatcher.check_integrity()
        self._seats.check_integrity()

    def _advance(self) -> None:
        """Wait for calls and act on those that have ended; without any, start groups or find out why none starts."""
        if not self._act(timeout_s=math.inf):
            self._start_again()

    def _take_turn(self) -> bool:
        """Start waiting groups and act on calls that end soon; False if no call is pending."""
        self._dispatch()
        return self._act(timeout_s=_POLL_S)

    def _act(self, *, timeout_s: float) -> bool:
        """Wait for calls, at most `timeout_s`, and act on those that have ended; False if none is pending."""
        calls = self._calls()
        if not calls:
            return False
        if self._watch is not None:
            timeout_s = min(self._watch.look_every_s, timeout_s)
        longest_s = None if math.isinf(timeout_s) else timeout_s
        ready, _ = ray.wait(calls, num_returns=1, timeout=longest_s, fetch_local=False)
        more, _ = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)
        for call in {*ready, *more}:
            self._act_on(call)
        self._scorers.check()
        if self._watch is not None:
            self._watch.look({item.engine for item in self._places.generating.values()} - self._losses.closed)
        self._dispatch()
        return True

    def _calls(self) -> list[ray.ObjectRef]:
        """All remote calls that have not ended."""
        return [*self._places.generating, *self._places.scoring, *self._seat_questions.calls, *self._survey.calls]

    def _act_on(self, call: ray.ObjectRef) -> None:
        """Act on a call that has ended; one that is no longer known went to an engine that was lost since."""
        if call in self._places.generating:
            self._returns.generated(call)
        elif call in self._places.scoring:
            self._returns.scored(call)
        elif call in self._survey.calls:
            self._read(self._survey, call)
        elif call in self._seat_questions.calls:
            self._read(self._seat_questions, call)

    def _read(self, asker: MigrationSurvey | SeatQuestions, call: ray.ObjectRef) -> None:
        """An engine has answered a question, or has died."""
        asked = asker.calls[call]
        try:
            asker.answered(call)
        except ray.exceptions.RayError as error:
            self._losses.call_failed(asked.engine, asked.incarnation, asked.method, error)

    def _start_again(self) -> None:
        """No call is pending: start waiting groups, after the restart of an engine if none is left.

        Raises:
            EnginesLostError: no engine is left, and nobody restarts one.
            RuntimeError: no group waits that an engine could start.
        """
        num_waiting = len(self._places.waiting)
        if not self._engines.alive:
            if self._revive is None:
                raise EnginesLostError(
                    f"no engine is left, and {num_waiting} groups wait: {self._engines.loss_reason(0)}",
                    Place(role="engine", ranks=self._engines.lost),
                )
            self._revive()
        self._dispatch()  # an engine may have been replaced since groups were started last
        if self._engines.alive and not self._calls():
            raise RuntimeError(f"nothing is being sampled, and {num_waiting} groups wait for a batch that needs more")

    def _dispatch(self) -> None:
        """Start waiting groups until no engine has room; ask engines for free seats, and for a group that migrates."""
        self._losses.follow()
        assigned = assign_seats(self._dispatcher, self._seats, self._engines.alive)
        for engine, forecast in assigned.starts:
            self._start(forecast, engine=engine)
        self._seat_questions.ask(assigned.full)
        self._survey.ask(self._losses.closed)

    def _start_whole_step(self) -> None:
        """Start everything that waits, on the only engine of a deterministic run; StepLostError if the engine died."""
        self._losses.follow()  # the engine may have been replaced between two steps
        timeout_s = _HOLD_TIMEOUT_S if self._watch is None else self._watch.timeout_s
        self._engines.hold(timeout_s=timeout_s)
        self._losses.check_step()
        entering: list[GroupId] = []
        while (forecast := self._dispatcher.take(0)) is not None:
            entering.append(forecast.group_id)
            self._seats.begin(0, forecast.num_responses)
            self._start(forecast, engine=0)
        # calls may overtake each other on their way, so the engine is told which groups to wait for, in order
        self._engines.release(entering, timeout_s=timeout_s)
        self._losses.check_step()

    def _start(self, forecast: GroupForecast, *, engine: int) -> None:
        """Let an engine begin a waiting group, or continue it with the tokens that were kept."""
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
