"""One run of engines and a trainer in simulated time, steered by the product's admission, policies and dispatcher."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.planner.simulator.engines import GROUP_ENDED, REACHED, Engines, Speed
from benchmarks.planner.simulator.workload import MAX_TOKENS, Workload
from history.lengths.estimate import LengthEstimate
from rollout.planning.admission import Admission, FixedBatches, FlexibleBatches, check_batches
from rollout.planning.dispatcher import Dispatcher, free_seats_for
from rollout.planning.migration import InFlight, MigrationRule
from rollout.planning.plan import GroupForecast
from rollout.planning.policies import plan
from rollout.tracing.engine_speed import EngineSpeed
from rollout.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where a run takes place."""

    num_engines: int
    num_slots: int
    speed: Speed
    train_s_per_token: float = 0.0
    train_s: tuple[float, ...] = ()
    """Of each step, where it does not go by tokens."""
    publish_s: float = 2.0
    """Engines stand still so long at every publish."""
    is_colocated: bool = False
    """Engines stand still while the trainer works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a run is planned."""

    policy: str
    overlap: int = 0
    head_start: float = 0.0
    max_staleness: int = 0
    migration: bool = False
    tail_share: float = 0.0
    """Of the engines, kept for the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run."""

    step_s: float
    """Seconds of a step, over the whole run."""
    idle: float
    """Share of engine time in which nothing ran."""
    mean_staleness: float
    max_staleness: int
    num_stolen: int
    num_moved: int
    num_waits: int
    consumed_lengths: npt.NDArray[np.float64]


def simulate(workload: Workload, cluster: Cluster, scheme: Scheme) -> Outcome:
    """Run every step of `workload`."""
    group_size = workload.lengths.shape[1]
    min_free_slots = free_seats_for(group_size, cluster.num_slots)
    numbers = np.arange(workload.lengths.size).reshape(workload.lengths.shape)
    engines = Engines(
        num_engines=cluster.num_engines,
        num_slots=cluster.num_slots,
        speed=cluster.speed,
        lengths=workload.lengths.ravel(),
        groups=np.repeat(np.arange(len(workload.lengths)), group_size),
        waiting_capacity=2 * group_size + 64,
    )
    admission = admission_of(workload, scheme)
    dispatcher = Dispatcher(cluster.num_engines)
    batches: list[list[GroupId]] = []
    started: dict[GroupId, int] = {}
    published_s = [0.0]
    now, train_until, num_moved = 0.0, np.inf, 0
    home: dict[int, int] = {}
    num_groups = np.zeros(cluster.num_engines, dtype=np.int64)
    mover = _mover(workload, cluster)
    tokens_of = workload.lengths.sum(axis=1)

    def feed(engine: int) -> None:
        while engines.free_slots(engine) >= min_free_slots:
            group = dispatcher.take(engine)
            if group is None:
                engines.asked[engine] = 0
                return
            started[group.group_id] = len(published_s) - 1
            admission.started(group.group_id, len(published_s) - 1)
            engines.give(engine, numbers[group.group_id], at_s=now)
            home[int(group.group_id)] = engine
            num_groups[engine] += 1
        engines.asked[engine] = min_free_slots

    def move() -> int:
        """An engine that has nothing to do takes over a group from the one with the most."""
        busiest, target = int(num_groups.argmax()), int(num_groups.argmin())
        if num_groups[busiest] < 2 or num_groups[target] or dispatcher.peek(target) is not None:
            return 0
        ids, had = engines.running(busiest, at_s=now)
        emitted: dict[int, list[int]] = {}
        for response, tokens in zip((ids // group_size).tolist(), had.astype(int).tolist(), strict=True):
            emitted.setdefault(response, []).append(tokens)
        chosen = mover.choose(
            [
                InFlight(group_id=GroupId(group), num_prompt_tokens=0, emitted=tuple(found))
                for group, found in emitted.items()
            ]
        )
        if chosen is None:
            return 0
        leaving = ids[ids // group_size == chosen]
        context = int(had[ids // group_size == chosen].sum())
        engines.take_away(busiest, leaving, at_s=now)
        price_s = float(cluster.speed.fixed_s[1] + (cluster.speed.fixed_s[2] - cluster.speed.fixed_s[1]) * context)
        engines.pause(target, now, now + price_s)
        engines.give(target, leaving, at_s=now + price_s)
        home[int(chosen)] = target
        num_groups[busiest] -= 1
        num_groups[target] += 1
        return 1

    def admit() -> None:
        groups = admission.due(len(published_s) - 1)
        loads = dispatcher.loads(cluster.num_slots)
        tail_engines = round(scheme.tail_share * cluster.num_engines)
        dispatcher.admit(plan(scheme.policy, groups, loads, tail_engines=tail_engines))
        for engine in range(cluster.num_engines):
            feed(engine)

    admit()
    while len(batches) < workload.num_steps or train_until < np.inf:
        if train_until == np.inf:
            batch = admission.batch(len(batches))
            if batch is not None:
                batches.append(batch)
                train_until = now + _train_s(cluster, len(batches) - 1, float(tokens_of[np.array(batch)].sum()))
                if cluster.is_colocated:
                    for engine in range(cluster.num_engines):
                        engines.pause(engine, now, train_until)
        why, engine, group, at_s = engines.run(train_until)
        now = at_s
        if why == REACHED:
            assert np.isfinite(train_until), (
                f"nothing runs, {len(dispatcher)} groups wait, batch {len(batches)} is not complete"
            )
            for number in range(cluster.num_engines):
                engines.pause(number, now, now + cluster.publish_s)
            now += cluster.publish_s
            published_s.append(now)
            train_until = np.inf
            admit()
            continue
        if why == GROUP_ENDED:
            admission.completed(GroupId(group))
            dispatcher.finish(GroupId(group))
            num_groups[home.pop(group)] -= 1
        if engines.asked[engine]:
            feed(engine)
        if scheme.migration and why == GROUP_ENDED:
            num_moved += move()
    check_batches(batches, started, groups_per_step=workload.groups_per_step, max_staleness=scheme.max_staleness)
    return _outcome(workload, cluster, num_moved, engines, admission, dispatcher, batches, published_s)


def _train_s(cluster: Cluster, step: int, tokens: float) -> float:
    return cluster.train_s[step] if cluster.train_s else cluster.train_s_per_token * tokens


def _mover(workload: Workload, cluster: Cluster) -> MigrationRule:
    """The product's rule, by the simulated engines' speed and the forecasts."""
    speed, forecasts = cluster.speed, workload.forecasts
    token_s = float(speed.fixed_s[2] - speed.fixed_s[1])
    known = EngineSpeed(
        fixed_s=float(speed.fixed_s[1]) - token_s,
        token_s=token_s,
        context_s=speed.context_s,
        saturated_requests=cluster.num_slots,
    )

    def remaining(group: GroupId, emitted: int) -> float:
        left = LengthEstimate.of([], prior_mean=float(forecasts[group])).remaining(emitted)
        return min(left, MAX_TOKENS - emitted)

    return MigrationRule(remaining=remaining, speed=lambda: known)


def admission_of(workload: Workload, scheme: Scheme) -> FixedBatches | FlexibleBatches:
    """The product's own admission of a workload, by a scheme."""
    group_size = workload.lengths.shape[1]

    def draw(step: int) -> list[GroupForecast]:
        first = step * workload.groups_per_step
        return [
            GroupForecast(group_id=GroupId(p), step=step, num_responses=group_size, tokens=float(workload.forecasts[p]))
            for p in range(first, first + workload.groups_per_step)
        ]

    if scheme.policy == "flexible":
        return FlexibleBatches(
            draw=draw,
            num_steps=workload.num_steps,
            groups_per_step=workload.groups_per_step,
            overlap=scheme.overlap,
            max_staleness=scheme.max_staleness,
        )
    return FixedBatches(draw=draw, num_steps=workload.num_steps, overlap=scheme.overlap, head_start=scheme.head_start)


def _outcome(
    workload: Workload,
    cluster: Cluster,
    num_moved: int,
    engines: Engines,
    admission: Admission,
    dispatcher: Dispatcher,
    batches: list[list[GroupId]],
    published_s: list[float],
) -> Outcome:
    begun = np.searchsorted(np.array(published_s), engines.started_s, side="right") - 1
    begun_by_group = begun.reshape(workload.lengths.shape)
    staleness = np.concatenate([u - begun_by_group[np.array(batch)].ravel() for u, batch in enumerate(batches)])
    elapsed = published_s[-1]
    return Outcome(
        step_s=elapsed / workload.num_steps,
        idle=1 - float(engines.busy_s().sum()) / (elapsed * cluster.num_engines),
        mean_staleness=float(staleness.mean()),
        max_staleness=int(staleness.max()),
        num_stolen=dispatcher.num_stolen,
        num_moved=num_moved,
        num_waits=admission.num_waits if isinstance(admission, FlexibleBatches) else 0,
        consumed_lengths=np.sort(np.concatenate([workload.lengths[np.array(batch)].ravel() for batch in batches])),
    )
