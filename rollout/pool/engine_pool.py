"""All engines of a run behind one queue: groups go in, scored groups come out.

Groups are placed whole. Who starts what is `rollout.planning.dispatcher`'s: an engine is given its next group when half
of it finds free slots. Slots become free response by response, not group by group, so an engine that is full is asked
to say when enough of its responses have ended (`EngineActor.ended_at_least`). The exception is a deterministic run
(`whole_step=True`), where everything admitted is handed over before the engine samples its first token, because the
composition of a batch must not depend on timing.

A group passes four places, each in exactly one of `_waiting`, `_generating`, `_scoring`, `_scored`;
`check_integrity` asserts it. Only references to tokens pass through here. One thread at a time:
`run_in_background` lends the pool to one of its own.

An engine that dies loses no group. Where its actor lives on, its groups come back with the tokens that they had and
go on elsewhere from there; where it died with it, they begin again at the prompt, with the same seeds. If no engine
is left, `revive` has to bring one.

An engine that has nothing to do while nothing waits may take over a group that runs elsewhere
(`rollout.planning.migration`): the group is aborted there and goes on here with the tokens that it has.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import ray

from rollout.failures import CallError, EnginesLostError, Place, ProcessLostError, brief, node_of
from rollout.planning.dispatcher import Dispatcher, free_slots_for
from rollout.planning.migration import GroupMigration, InFlight
from rollout.planning.plan import EngineLoad, GroupForecast, RolloutPlan
from rollout.pool.engine_group import EngineGroup
from rollout.pool.scorer_pool import ScorerPool
from rollout.types import GroupId, GroupSummary, PromptGroup, ScoredGroup

Progress = Callable[[int, int], None]
"""Called with (groups finished, groups wanted) whenever a group is scored."""

TRAIN = "train"
"""`PromptGroup.purpose` of what is trained on."""

_POLL_S = 0.2
_FIRST = -1
"""Step of what is taken before all others: evaluations."""


class Batches(Protocol):
    """Who says which groups are trained on together, and is told what happens to them
    (`rollout.planning.planner.Planner`).
    """

    def started(self, group_id: GroupId) -> None:
        """An engine has taken a group."""
        ...

    def completed(self, group_id: GroupId) -> None:
        """A group is sampled and scored."""
        ...

    def batch(self, step: int) -> list[GroupId] | None:
        """The groups of a step's batch, or None while it has to be waited for."""
        ...

    def progress(self, step: int) -> tuple[int, int]:
        """(groups of the batch that are complete, groups that it needs)"""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generating:
    group: PromptGroup
    engine: int
    columns: ray.ObjectRef


class EnginePool:
    """Engines and scorers of a run, driven by the controller."""

    def __init__(
        self,
        engines: EngineGroup,
        scorers: Sequence[ray.actor.ActorHandle],
        *,
        slots_per_engine: int,
        batches: Batches | None = None,
        whole_step: bool = False,
        migration: GroupMigration | None = None,
        revive: Callable[[], None] | None = None,
    ) -> None:
        """`engines` have not sampled for another pool; `scorers` are `rollout.rewards.scorer.ScorerActor` handles.

        Without `batches` there is no training, and `take_batch` may not be called. Without `migration` every group
        stays where it was begun. `revive` is called when no engine is left, and returns when there is one that
        serves; without it, that is an error.
        """
        self.migration = migration or GroupMigration()
        """Groups that go on elsewhere because an engine has nothing to do."""
        self.num_reissued = 0
        """Groups that were begun again, or went on elsewhere, because their engine had died."""
        self._engines = engines
        self._scoring = ScorerPool(scorers)
        self._slots = slots_per_engine
        self._batches = batches
        self._whole_step = whole_step
        self._revive = revive
        self._waiting: dict[GroupId, PromptGroup] = {}
        self._dispatcher = Dispatcher(len(self._engines))
        self._begun: dict[GroupId, tuple[GroupSummary, ray.ObjectRef]] = {}
        """What waiting groups have already."""
        self._closed: set[int] = set()
        self._sent = [0] * len(self._engines)
        self._ended = [0] * len(self._engines)
        self._asked: dict[ray.ObjectRef, int] = {}
        self._survey: tuple[ray.ObjectRef, int] | None = None
        """What the engine that `migration` named runs, and its number."""
        self._generating: dict[ray.ObjectRef, _Generating] = {}
        self._scored: dict[GroupId, ScoredGroup] = {}

    def loads(self) -> list[EngineLoad]:
        """What each engine has to do, as planning sees it."""
        return self._dispatcher.loads(self._slots)

    def admit(self, groups: Sequence[PromptGroup], plan: RolloutPlan | None = None) -> None:
        """Queue `groups` as planned, and start as many as there is room for.

        Without a plan they come before everything that waits, and any engine takes the next one.
        """
        plan = plan or self._in_order(groups)
        self._waiting.update((group.group_id, group) for group in groups)
        self._dispatcher.admit(plan)
        if self._whole_step:
            (engine,) = self._engines.actors
            ray.get(engine.hold.remote())
            entering: list[GroupId] = []
            while (forecast := self._dispatcher.take(0)) is not None:
                entering.append(forecast.group_id)
                self._start(forecast, engine=0)
            # calls may overtake each other on their way, so the engine is told whom to wait for, and in which order
            ray.get(engine.release.remote(entering))
        else:
            self._dispatch()

    def take(self, purpose: str, step: int, *, progress: Progress | None = None) -> list[ScoredGroup]:
        """Wait until every admitted group of (`purpose`, `step`) is scored; they leave the pool, in order of admission.

        Raises:
            RuntimeError: an engine or a scorer died or raised; the error names it and the group.
        """
        wanted = sorted(group.group_id for group in self._admitted() if (group.purpose, group.step) == (purpose, step))
        while missing := sum(group_id not in self._scored for group_id in wanted):
            _tell(progress, len(wanted) - missing, len(wanted))
            self._advance()
        _tell(progress, len(wanted), len(wanted))
        return [self._scored.pop(group_id) for group_id in wanted]

    def take_batch(self, step: int, *, progress: Progress | None = None) -> list[ScoredGroup]:
        """Wait until a step's batch can be made up (`Batches.batch`); its groups leave the pool, in order of admission.

        Raises:
            RuntimeError: an engine or a scorer died or raised; the error names it and the group.
        """
        assert self._batches is not None, "a pool without `batches` does not train"
        while (wanted := self._batches.batch(step)) is None:
            _tell(progress, *self._batches.progress(step))
            self._advance()
        _tell(progress, len(wanted), len(wanted))
        return [self._scored.pop(group_id) for group_id in wanted]

    @contextmanager
    def run_in_background(self) -> Iterator[None]:
        """While the caller does something else, engines are given what waits, and what is finished is scored.

        Raises:
            RuntimeError: an engine or a scorer died or raised meanwhile; at the end.
        """
        ends, failures = threading.Event(), list[Exception]()

        def work() -> None:
            try:
                while not ends.is_set():
                    self._dispatch()
                    if self._calls():
                        self._advance(timeout_s=_POLL_S)
                    else:
                        ends.wait(_POLL_S)
            except Exception as error:  # raised below, where the caller comes back
                failures.append(error)

        thread = threading.Thread(target=work, name="pool", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            error.add_note(f"the pool beside it: {failures[0] if failures else 'no failure'}")
            raise
        finally:
            ends.set()
            thread.join()
        if failures:
            raise failures[0]

    def check_integrity(self) -> None:
        """Assert that every group is in exactly one place and that no engine holds more than its slots allow."""
        ids = [group.group_id for group in self._admitted()]
        assert len(ids) == len(set(ids)), "a group is in two places"
        self._dispatcher.check_integrity()
        for engine in range(len(self._engines)):
            assert 0 <= self._ended[engine] <= self._sent[engine], "more responses have ended than were begun"

    def _in_order(self, groups: Sequence[PromptGroup]) -> RolloutPlan:
        forecasts = [
            GroupForecast(
                group_id=group.group_id,
                step=_FIRST,
                num_responses=len(group.seeds),
                tokens=float(group.sampling.max_response_tokens),
            )
            for group in groups
        ]
        number = len(self._engines)
        return RolloutPlan(queues=tuple(tuple(forecasts[engine::number]) for engine in range(number)), shares_work=True)

    def _admitted(self) -> list[PromptGroup]:
        return [
            *self._waiting.values(),
            *(item.group for item in self._generating.values()),
            *self._scoring.groups(),
            *(scored.group for scored in self._scored.values()),
        ]

    def _used(self, engine: int) -> int:
        """Slots of an engine that are taken, as far as it has said."""
        return self._sent[engine] - self._ended[engine]

    def _dispatch(self) -> None:
        """Give the emptiest engines something to do until none has room; those that could have more are asked for
        it.
        """
        self._note_who_is_there()
        hungry = set(self._engines.there)
        while hungry:
            engine = min(hungry, key=lambda number: (self._used(number), number))
            forecast = self._dispatcher.peek(engine)
            needed = 0 if forecast is None else free_slots_for(forecast.num_responses, self._slots)
            if forecast is None or self._slots - self._used(engine) < needed:
                hungry.discard(engine)
                if forecast is not None and engine not in self._asked.values():
                    enough = self._sent[engine] - (self._slots - needed)
                    self._asked[self._engines.actors[engine].ended_at_least.remote(enough)] = engine
                continue
            self._dispatcher.take(engine)
            self._start(forecast, engine=engine)
        self._look_for_a_move()

    def _start(self, forecast: GroupForecast, *, engine: int) -> None:
        group = self._waiting.pop(forecast.group_id)
        call = self._engines.actors[engine].generate_group.options(num_returns=2)
        summary, columns = call.remote(group, *self._begun.pop(group.group_id, ()))
        self._generating[summary] = _Generating(group=group, engine=engine, columns=columns)
        self._sent[engine] += len(group.seeds)
        if self._batches is not None and group.purpose == TRAIN:
            self._batches.started(group.group_id)

    def _calls(self) -> list[ray.ObjectRef]:
        """All that are under way."""
        surveys = [] if self._survey is None else [self._survey[0]]
        return [*self._generating, *self._scoring, *self._asked, *surveys]

    def _advance(self, timeout_s: float | None = None) -> None:
        waiting = self._calls()
        if not waiting and not self._engines.there and self._revive is not None:
            self._revive()
            self._dispatch()
            return
        if not waiting and not self._engines.there:
            raise EnginesLostError(
                f"no engine is left, and {len(self._waiting)} groups wait: {self._engines.why(0)}",
                Place(role="engine", ranks=self._engines.lost),
            )
        if not waiting:
            raise RuntimeError(
                f"nothing is being sampled, and {len(self._waiting)} groups wait for a batch that needs more"
            )
        ready, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s, fetch_local=False)
        more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        for ref in {*ready, *more}:
            if self._survey is not None and ref == self._survey[0]:
                self._move_one(*self._survey)
            elif ref in self._asked:
                self._note_ended(ref)
            elif ref in self._generating:
                self._finish_generating(ref)
            elif ref in self._scoring:
                self._finish_scoring(ref)
            # else it was asked of an engine of whose end another ref has told
        self._dispatch()

    def _look_for_a_move(self) -> None:
        running = Counter(item.engine for item in self._generating.values() if item.engine not in self._closed)
        engine = self.migration.donor(running, self._idle_engine())
        if engine is not None:
            self._survey = (self._engines.actors[engine].in_flight.remote(), engine)

    def _idle_engine(self) -> int | None:
        """One that runs nothing and has nothing to wait for."""
        busy = {item.engine for item in self._generating.values()}
        idle = (engine for engine in self._engines.there if engine not in busy)
        return next((engine for engine in idle if self._dispatcher.peek(engine) is None), None)

    def _move_one(self, ref: ray.ObjectRef, source: int) -> None:
        """An engine has said what it runs: the group that gains most by it leaves for an idle engine."""
        self._survey = None
        try:
            running: list[InFlight] = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            self._lose(source, error)
            return
        except ray.exceptions.RayError as error:
            raise _failed(source, "in_flight", error) from error
        trained = {
            item.group.group_id
            for item in self._generating.values()
            if item.engine == source and item.group.purpose == TRAIN
        }
        chosen = self.migration.answered([one for one in running if one.group_id in trained], self._idle_engine())
        if chosen is not None:
            self._engines.actors[source].abort.remote(chosen)

    def _note_ended(self, ref: ray.ObjectRef) -> None:
        engine = self._asked.pop(ref)
        try:
            self._ended[engine] = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            self._lose(engine, error)
        except ray.exceptions.RayError as error:
            raise _failed(engine, "ended_at_least", error) from error
        if self._ended[engine] > self._sent[engine]:
            raise RuntimeError(
                f"engine {engine} has ended {self._ended[engine]} responses, of which this pool began "
                f"{self._sent[engine]}: an engine has one pool, from its start on"
            )

    def _lose(self, engine: int, error: Exception) -> None:
        """An engine has died; raises where there is no going on without it."""
        if self._whole_step:
            raise EnginesLostError(
                f"engine {engine} died, and a deterministic run has no other: {brief(error)}",
                Place(role="engine", ranks=(engine,), node=node_of(error)),
            ) from error
        self._engines.lose(engine, brief(error))
        self._note_who_is_there()

    def _issue_again(self, group: PromptGroup, *, at: int | None = None) -> None:
        self._waiting[group.group_id] = group
        self._dispatcher.again(group.group_id, at=at)

    def _note_who_is_there(self) -> None:
        """Close the queues of engines that are lost, and open those of engines that have come."""
        lost = set(self._engines.lost)
        for engine in lost - self._closed:
            self._dispatcher.close(engine)
            # a successor counts from 0; whoever asked the old one is answered by its end
            self._asked = {ref: number for ref, number in self._asked.items() if number != engine}
            self._sent[engine] = self._ended[engine] = 0
            if self.migration.lost(engine):
                self._survey = None
        for engine in self._closed - lost:
            self._dispatcher.open(engine)
        self._closed = lost

    def _finish_generating(self, ref: ray.ObjectRef) -> None:
        item = self._generating.pop(ref)
        try:
            summary: GroupSummary = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            self.migration.returned(item.group.group_id, goes_on=False)
            self._lose(item.engine, error)
            self.num_reissued += 1
            self._issue_again(item.group)
            return
        except ray.exceptions.RayError as error:
            raise _failed(item.engine, f"group {item.group.group_id}", error) from error
        target = self.migration.returned(item.group.group_id, goes_on=summary.is_unfinished and not summary.fault)
        if summary.fault:
            self._lose(item.engine, ProcessLostError(summary.fault))
            if summary.is_unfinished:
                self._begun[item.group.group_id] = (summary, item.columns)
                self.num_reissued += 1
                self._issue_again(item.group)
                return
        elif target is not None:
            self._begun[item.group.group_id] = (summary, item.columns)
            self._issue_again(item.group, at=target)
            return
        self._dispatcher.finish(item.group.group_id)
        self._scoring.submit(item.group, summary, item.columns)

    def _finish_scoring(self, ref: ray.ObjectRef) -> None:
        scored = self._scoring.finish(ref)
        self._scored[scored.group.group_id] = scored
        if self._batches is not None and scored.group.purpose == TRAIN:
            self._batches.completed(scored.group.group_id)


def _failed(engine: int, what: str, error: Exception) -> CallError:
    place = Place(role="engine", ranks=(engine,), node=node_of(error))
    return CallError(f"engine {engine}: {what} failed: {brief(error)}", place)


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
