"""A pool with a stand-in for Ray in this process: responses end, engines die and restart, in random order.

`python -m tests.support.pool_stress EVENTS [SEED]` runs any number of events; the test runs fewer.
"""

import random
import sys
from dataclasses import dataclass, field, replace

import pytest

from rollout.planning.admission import FixedBatches, FlexibleBatches, check_batches
from rollout.planning.migration import GroupMigration, InFlight
from rollout.planning.plan import GroupForecast
from rollout.planning.policies import POLICIES, plan
from rollout.planning.refill import RefilledBatches, check_refilled
from rollout.pool import (
    engine_losses,
    engine_pool,
    group_returns,
    heartbeat,
    migration_survey,
    scorer_pool,
    seat_questions,
)
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.types import FinishReason, GroupId, Score, ScoreStatus
from tests.support.scored_groups import scored_group, scorer_answer

TEMPLATE = scored_group(0)
SIZE = len(TEMPLATE.group.seeds)
SLOTS = 12


class RayError(Exception):
    pass


class ActorDiedError(RayError):
    pass


class ObjectLostError(RayError):
    pass


@dataclass(eq=False)
class Ref:
    """A call's result: a value, or an exception, once `is_ready`."""

    is_ready: bool = False
    value: object = None


@dataclass
class FakeRay:
    """`ray` as the modules of the pool use it; events happen during `wait`."""

    world: "World"

    class exceptions:  # noqa: N801
        RayError = RayError
        RayActorError = ActorDiedError
        ObjectLostError = ObjectLostError

    def wait(self, refs, *, num_returns=1, timeout=None, fetch_local=False):
        del fetch_local
        while timeout is None and not any(ref.is_ready for ref in refs):
            self.world.happen()
        ready = [ref for ref in refs if ref.is_ready][: num_returns if timeout is None else len(refs)]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref):
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value


RAY_USERS = (engine_pool, engine_losses, group_returns, migration_survey, seat_questions, scorer_pool, heartbeat)
"""Modules of the pool that call Ray; engines of the stand-in are not watched."""


def replace_ray(monkeypatch, world):
    """Give the pool a stand-in for Ray until the test ends."""
    for module in RAY_USERS:
        monkeypatch.setattr(module, "ray", FakeRay(world))


class Method:
    def __init__(self, call):
        self._call = call

    def options(self, **_):
        return self

    def remote(self, *args):
        return self._call(*args)


@dataclass(eq=False)
class Engine:
    """Responses end one by one; a group's call returns with the last one."""

    world: "World"
    is_alive: bool = True
    ended: int = 0
    running: dict = field(default_factory=dict)
    """Group: (ref of the summary, ref of the columns, responses that have not ended)"""
    asked: list = field(default_factory=list)
    surveys: list = field(default_factory=list)
    aborting: list = field(default_factory=list)
    returned: list = field(default_factory=list)
    """Columns that are in the memory of this engine's node."""

    @property
    def generate_group(self):
        return Method(self._generate)

    @property
    def ended_at_least(self):
        return Method(self._ended_at_least)

    @property
    def in_flight(self):
        return Method(self._in_flight)

    @property
    def abort(self):
        return Method(self.aborting.append)

    def _in_flight(self):
        ref = Ref()
        self.surveys.append(ref)
        if not self.is_alive:
            ref.is_ready, ref.value = True, ActorDiedError("gone")
        return ref

    def tell_what_runs(self):
        """Answer queries about requests in flight; an answer may be outdated on arrival."""
        for ref in self.surveys:
            ref.is_ready = True
            ref.value = [
                InFlight(group_id=group_id, num_prompt_tokens=1, emitted=(1,) * had.count(False))
                for group_id, (_, _, had) in self.running.items()
            ]
        self.surveys = []

    def abort_as_told(self):
        for group_id in self.aborting:
            if group_id in self.running:
                self.ended += self.running[group_id][2].count(False)
                self.world.num_moved += 1
                self._return(group_id)
        self.aborting = []
        self._answer()

    def _generate(self, group, summary=None, columns=None):
        refs = Ref(), Ref(value=columns)
        if not self.is_alive:
            refs[0].is_ready, refs[0].value = True, ActorDiedError("gone")
            return refs
        if columns is not None and columns in self.world.lost:  # Ray cannot give the call its arguments
            self.world.num_lost += 1
            refs[0].is_ready, refs[0].value = True, ObjectLostError("gone")
            return refs
        had = [False] * SIZE if summary is None else [r is not FinishReason.ABORT for r in summary.finish_reasons]
        self.world.begun(group.group_id, sum(had))
        self.ended += sum(had)
        self.running[group.group_id] = (*refs, had)
        if all(had):
            self._return(group.group_id)
        return refs

    def _ended_at_least(self, count):
        ref = Ref()
        if not self.is_alive:
            ref.is_ready, ref.value = True, ActorDiedError("gone")
        else:
            self.asked.append((count, ref))
            self._answer()
        return ref

    def end_one(self):
        group_id = self.world.generator.choice(list(self.running))
        had = self.running[group_id][2]
        had[had.index(False)] = True
        self.ended += 1
        if all(had):
            self._return(group_id)
        self._answer()

    def abort_one(self):
        """Abort a group; its call returns the tokens sampled so far."""
        group_id = self.world.generator.choice(list(self.running))
        if group_id in self.aborting:  # the group migrates, so it resumes elsewhere
            return
        self.ended += self.running[group_id][2].count(False)
        self.world.num_aborted += 1
        self.world.aborted.add(self.running[group_id][1])
        self._return(group_id)
        self._answer()

    def _return(self, group_id, fault=""):
        ref, columns, had = self.running.pop(group_id)
        self.returned.append(columns)
        reasons = tuple(FinishReason.STOP if ended else FinishReason.ABORT for ended in had)
        ref.is_ready = True
        ref.value = replace(TEMPLATE.summary, group_id=group_id, finish_reasons=reasons, fault=fault)

    def _answer(self):
        for count, ref in self.asked:
            if self.ended >= count and not ref.is_ready:
                ref.is_ready, ref.value = True, self.ended
        self.asked = [(count, ref) for count, ref in self.asked if not ref.is_ready]

    def die(self, with_actor):
        self.is_alive = False
        for group_id in list(self.running):
            if with_actor:
                self.running.pop(group_id)[0].__init__(is_ready=True, value=ActorDiedError("killed"))
            else:
                self._return(group_id, fault="the core died")
        for ref in [*(ref for _, ref in self.asked), *self.surveys]:
            ref.is_ready, ref.value = True, ActorDiedError("killed")
        self.aborting = []
        if self.world.generator.random() < 0.5:  # its node has died too, with the tokens that it has returned
            self.world.lost |= set(self.returned)


@dataclass
class World:
    generator: random.Random
    engines: EngineGroup = field(init=False)
    scores: list = field(default_factory=list)
    num_events: int = 0
    num_deaths: int = 0
    num_aborted: int = 0
    num_moved: int = 0
    lost: set = field(default_factory=set)
    """Columns that were lost with a node."""
    aborted: set = field(default_factory=set)
    """Columns of groups that were aborted for good."""
    num_lost: int = 0
    """Calls whose columns were lost."""
    num_kept: int = 0
    """Responses that had ended before their group went on elsewhere."""

    def begun(self, group_id, num_had):
        del group_id
        self.num_kept += num_had

    def happen(self):
        """One event: a response ends, a group is scored, an engine dies or restarts."""
        self.num_events += 1
        draw, busy = self.generator.random(), [e for e in self.engines.actors if e.is_alive and e.running]
        asked = [e for e in self.engines.actors if e.is_alive and (e.surveys or e.aborting)]
        if asked and (draw < 0.5 or not busy):
            engine = self.generator.choice(asked)
            engine.tell_what_runs() if engine.surveys else engine.abort_as_told()
            return
        draw = self.generator.random()
        if self.scores and (draw < 0.1 or not busy):
            ref, parts = self.scores.pop(self.generator.randrange(len(self.scores)))
            ref.is_ready = True
            if any(part in self.lost for part in parts):
                self.num_lost += 1
                self.num_aborted -= any(part in self.aborted for part in parts)  # the group begins again, whole
                ref.value = ObjectLostError("gone")
            else:
                ref.value = scorer_answer([Score(reward=1.0, status=ScoreStatus.OK)] * SIZE)
        elif busy and draw < 0.996:
            self.generator.choice(busy).end_one()
        elif busy and draw < 0.998:
            self.generator.choice(busy).abort_one()
        elif busy:
            self.num_deaths += 1
            self.generator.choice(busy).die(with_actor=self.generator.random() < 0.5)

    def bring_back(self):
        for number in self.engines.lost:
            self.engines.replace(number, EngineGroup([Engine(self)], num_ranks=1))

    def choose(self, running):
        """A migration rule that chooses at random."""
        groups = [group.group_id for group in running]
        return self.generator.choice(groups) if groups and self.generator.random() < 0.5 else None

    def score(self, group, *parts):
        del group
        self.scores.append((Ref(), parts))
        return self.scores[-1][0]

    def alive(self):
        answer = Ref()
        answer.is_ready = True
        return answer

    @property
    def scorer(self):
        """The handle of a scorer."""
        return type("Scorer", (), {"score": Method(self.score), "alive": Method(self.alive)})


@dataclass
class Watched:
    """Callbacks of the pool, and the batches that result."""

    admission: object
    started_under: dict = field(default_factory=dict)
    version: int = 0

    def started(self, group_id):
        self.started_under.setdefault(group_id, self.version)
        self.admission.started(group_id, self.version)

    def completed(self, scored):
        self.admission.completed(scored.group.group_id)

    def batch(self, step):
        return self.admission.batch(step)

    def progress(self, step):
        return self.admission.progress(step)


def stress(num_events: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> World:
    """Run forty steps at a time for this many events; each run checks that every group was trained on once."""
    generator = random.Random(seed)
    world = World(generator)
    replace_ray(monkeypatch, world)
    while world.num_events < num_events:
        refilled_run(world, generator) if generator.random() < 0.3 else one_run(world, generator)
    return world


def new_pool(world: World, generator: random.Random, watched: Watched) -> EnginePool:
    world.engines = EngineGroup([Engine(world) for _ in range(generator.randrange(1, 5))], num_ranks=1)
    world.scores.clear()
    return EnginePool(
        world.engines,
        [world.scorer],
        seats_per_engine=SLOTS,
        batches=watched,
        migration=GroupMigration(rule=world),
        revive=world.bring_back,
    )


def groups_of(forecasts):
    return [replace(TEMPLATE.group, group_id=forecast.group_id, step=forecast.step) for forecast in forecasts]


def between_steps(world: World, generator: random.Random) -> None:
    for _ in range(generator.randrange(20)):  # the trainer works
        world.happen()
    if generator.random() < 0.5:  # a publish restarts all lost engines
        world.bring_back()


def one_run(world: World, generator: random.Random) -> None:
    num_steps, per_step = 40, generator.randrange(1, 12)
    policy, overlap = generator.choice(list(POLICIES)), generator.randrange(3)
    head_start = generator.choice([0.0, 0.3])

    def draw(step):
        return [
            GroupForecast(
                group_id=GroupId(step * per_step + i),
                step=step,
                num_responses=SIZE,
                tokens=generator.lognormvariate(3, 1),
            )
            for i in range(per_step)
        ]

    if policy == "flexible":
        bound = overlap + generator.randrange(2)
        admission = FlexibleBatches(
            draw=draw, num_steps=num_steps, groups_per_step=per_step, overlap=overlap, max_staleness=bound
        )
    else:
        bound = overlap + (head_start > 0)
        admission = FixedBatches(draw=draw, num_steps=num_steps, overlap=overlap, head_start=head_start)
    watched = Watched(admission)
    pool = new_pool(world, generator, watched)
    moved_before = world.num_moved
    batches, rewards, num_aborted, aborted_before = [], 0, 0, world.num_aborted
    for step in range(num_steps):
        watched.version = step
        forecasts = admission.due(step)
        pool.admit(groups_of(forecasts), plan(policy, forecasts, pool.loads()))
        taken = pool.take_batch(step)
        batches.append([scored.group.group_id for scored in taken])
        rewards += sum(len(scored.rewards) for scored in taken)
        num_aborted += sum(scored.summary.is_unfinished for scored in taken)
        pool.check_integrity()
        between_steps(world, generator)
    assert num_aborted == world.num_aborted - aborted_before, "an abort was lost, or happened twice"
    assert pool.migration.num_moved <= world.num_moved - moved_before
    assert rewards == num_steps * per_step * SIZE
    check_batches(batches, watched.started_under, groups_per_step=per_step, max_staleness=bound)


@dataclass
class Judged(Watched):
    """Groups without signal are replaced."""

    signal: dict = field(default_factory=dict)

    def completed(self, scored):
        group_id = scored.group.group_id
        self.signal[group_id] = group_id * 7 % 10 < 4
        self.admission.completed(group_id, has_signal=self.signal[group_id], num_tokens=1)


def refilled_run(world: World, generator: random.Random) -> None:
    """A run in which 60 % of groups have no signal."""
    num_steps, per_step, overlap = 20, generator.randrange(1, 8), generator.randrange(3)
    policy, bound, numbers = generator.choice(["static", "adaptive"]), overlap + generator.randrange(2), [0]

    def draw(version, steps, is_admitted):
        del version
        first, numbers[0] = numbers[0], numbers[0] + (len(steps) if is_admitted else 0)
        return [
            GroupForecast(group_id=GroupId(first + i), step=step, num_responses=SIZE, tokens=9.0)
            for i, step in enumerate(steps)
        ]

    admission = RefilledBatches(
        draw=draw,
        num_steps=num_steps,
        groups_per_step=per_step,
        max_groups=20 * per_step,
        overlap=overlap,
        max_staleness=bound,
    )
    watched = Judged(admission)
    pool = new_pool(world, generator, watched)
    batches, outdated = [], []

    def admit(forecasts):
        pool.admit(groups_of(forecasts), plan(policy, forecasts, pool.loads()))

    for step in range(num_steps):
        watched.version = step
        admit(admission.due(step))
        taken = pool.take_batch(step, refill=lambda step=step: admit(admission.refill(step)))
        batches.append([scored.group.group_id for scored in taken])
        outdated += [scored.group.group_id for scored in pool.drop(admission.outdated(step))]
        pool.check_integrity()
        between_steps(world, generator)
    check_refilled(
        batches,
        outdated,
        started=watched.started_under,
        with_signal=watched.signal,
        groups_per_step=per_step,
        max_staleness=bound,
    )


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        done = stress(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, patch)
    print(f"{done.num_events} events: {done.num_aborted} groups aborted, {done.num_deaths} engines lost, ", end="")
    print(f"{done.num_moved} groups moved, {done.num_kept} responses kept over a loss or a move, ", end="")
    print(f"{done.num_lost} calls whose tokens were lost")
