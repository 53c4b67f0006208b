"""One run of engines and a trainer in simulated time, controlled by the product's admission, policies and dispatcher.

The simulation alternates between two kinds of events, in the order of time: a group of responses ends on an engine, or
the trainer finishes a step and publishes. After a publish the product's assignment of seats starts groups on all
engines. After an end only the engine on which it happened has new room, and takes the dispatcher's next groups.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.planner.simulator.engines import GROUP_ENDED, REACHED, Engines
from benchmarks.planner.simulator.scheme import Cluster, Scheme, admission_of, migration_rule
from benchmarks.planner.simulator.workload import Workload
from rollout.planning.admission import FlexibleBatches, check_batches
from rollout.planning.dispatcher import Dispatcher, free_seats_for
from rollout.planning.migration import InFlight
from rollout.planning.plan import GroupForecast
from rollout.planning.policies import plan
from rollout.pool.seat_assignment import assign_seats
from rollout.pool.seat_counts import SeatCounts
from rollout.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of a finished run."""

    step_s: float
    """Elapsed seconds over the number of steps."""
    idle: float
    """Share of engine time without a running response."""
    mean_staleness: float
    max_staleness: int
    num_stolen: int
    num_moved: int
    num_waits: int
    consumed_lengths: npt.NDArray[np.float64]
    """[P * G] tokens, ascending."""


def simulate(workload: Workload, cluster: Cluster, scheme: Scheme) -> Outcome:
    """Run every step of `workload`."""
    return _Simulation(workload, cluster, scheme).run()


class _Simulation:
    """State of a run: the clock, the engines, the planner, the batches and the publishes so far."""

    def __init__(self, workload: Workload, cluster: Cluster, scheme: Scheme) -> None:
        self._workload, self._cluster, self._scheme = workload, cluster, scheme
        self._group_size = group_size = workload.lengths.shape[1]
        self._min_free_seats = free_seats_for(group_size, cluster.num_slots)
        self._response_ids = np.arange(workload.lengths.size).reshape(workload.lengths.shape)
        self._group_tokens = workload.lengths.sum(axis=1)
        self._engines = Engines(
            num_engines=cluster.num_engines,
            num_slots=cluster.num_slots,
            speed=cluster.speed,
            lengths=workload.lengths.ravel(),
            groups=np.repeat(np.arange(len(workload.lengths)), group_size),
            waiting_capacity=2 * group_size + 64,
        )
        self._admission = admission_of(workload, scheme)
        self._dispatcher = Dispatcher(cluster.num_engines)
        self._migration = migration_rule(workload, cluster)
        self._now = 0.0
        self._train_until = np.inf
        """When the current batch is trained; infinite: the trainer waits for a batch."""
        self._published_s = [0.0]
        """Time of each publish; the first one loads the initial weights."""
        self._batches: list[list[GroupId]] = []
        self._started: dict[GroupId, int] = {}
        """Policy version under which each group started."""
        self._engine_of: dict[int, int] = {}
        """Engine of each running group."""
        self._num_groups = np.zeros(cluster.num_engines, dtype=np.int64)
        """[E], running groups."""
        self._num_moved = 0

    @property
    def _version(self) -> int:
        return len(self._published_s) - 1

    def run(self) -> Outcome:
        """Simulate until the last batch is trained."""
        self._admit()
        while len(self._batches) < self._workload.num_steps or self._train_until < np.inf:
            if self._train_until == np.inf:
                self._start_training()
            why, engine, group, self._now = self._engines.run(self._train_until)
            if why == REACHED:
                self._publish()
                self._admit()
                continue
            if why == GROUP_ENDED:
                self._finish(group)
            if self._engines.asked[engine]:
                self._feed(engine)
            if self._scheme.migration and why == GROUP_ENDED:
                self._migrate()
        check_batches(
            self._batches,
            self._started,
            groups_per_step=self._workload.groups_per_step,
            max_staleness=self._scheme.max_staleness,
        )
        return self._outcome()

    def _admit(self) -> None:
        """Plan the groups that are due and fill the engines."""
        num_engines, num_slots = self._cluster.num_engines, self._cluster.num_slots
        groups = self._admission.due(self._version)
        loads = self._dispatcher.loads(num_slots)
        tail_engines = round(self._scheme.tail_share * num_engines)
        self._dispatcher.admit(plan(self._scheme.policy, groups, loads, tail_engines=tail_engines))
        seats = SeatCounts(num_engines, seats_per_engine=num_slots)
        for engine in range(num_engines):
            seats.begin(engine, num_slots - self._engines.free_slots(engine))
        assigned = assign_seats(self._dispatcher, seats, range(num_engines))
        for engine, group in assigned.starts:
            self._start(engine, group)
        for engine in range(num_engines):
            self._engines.asked[engine] = self._min_free_seats if engine in assigned.full else 0

    def _feed(self, engine: int) -> None:
        """Start the dispatcher's next groups while the engine has slots for one."""
        while self._engines.free_slots(engine) >= self._min_free_seats:
            group = self._dispatcher.take(engine)
            if group is None:
                self._engines.asked[engine] = 0
                return
            self._start(engine, group)
        self._engines.asked[engine] = self._min_free_seats

    def _start(self, engine: int, group: GroupForecast) -> None:
        """Give a group to an engine."""
        self._started[group.group_id] = self._version
        self._admission.started(group.group_id, self._version)
        self._engines.give(engine, self._response_ids[group.group_id], at_s=self._now)
        self._engine_of[int(group.group_id)] = engine
        self._num_groups[engine] += 1

    def _finish(self, group: int) -> None:
        self._admission.completed(GroupId(group))
        self._dispatcher.finish(GroupId(group))
        self._num_groups[self._engine_of.pop(group)] -= 1

    def _start_training(self) -> None:
        """Train the next batch, if it is complete."""
        step = len(self._batches)
        batch = self._admission.batch(step)
        if batch is None:
            return
        self._batches.append(batch)
        num_tokens = float(self._group_tokens[np.array(batch)].sum())
        self._train_until = self._now + self._cluster.step_train_s(step, num_tokens)
        if self._cluster.is_colocated:
            for engine in range(self._cluster.num_engines):
                self._engines.pause(engine, self._now, self._train_until)

    def _publish(self) -> None:
        """Pause all engines for a publish; the trainer then waits for its next batch."""
        assert np.isfinite(self._train_until), (
            f"no engine runs, {len(self._dispatcher)} groups wait, batch {len(self._batches)} is not complete"
        )
        publish_s = self._cluster.publish_s
        for engine in range(self._cluster.num_engines):
            self._engines.pause(engine, self._now, self._now + publish_s)
        self._now += publish_s
        self._published_s.append(self._now)
        self._train_until = np.inf

    def _migrate(self) -> None:
        """Move a group from the engine with the most groups to an idle one, if the migration rule finds it worth it."""
        busiest, target = int(self._num_groups.argmax()), int(self._num_groups.argmin())
        if self._num_groups[busiest] < 2 or self._num_groups[target] or self._dispatcher.peek(target) is not None:
            return
        ids, num_emitted = self._engines.running(busiest, at_s=self._now)
        groups = ids // self._group_size
        emitted: dict[int, list[int]] = {}
        for group, tokens in zip(groups.tolist(), num_emitted.astype(int).tolist(), strict=True):
            emitted.setdefault(group, []).append(tokens)
        chosen = self._migration.choose(
            [
                InFlight(group_id=GroupId(group), num_prompt_tokens=0, emitted=tuple(tokens))
                for group, tokens in emitted.items()
            ]
        )
        if chosen is None:
            return
        leaving = ids[groups == chosen]
        self._engines.take_away(busiest, leaving, at_s=self._now)
        arrives_s = self._now + self._recompute_s(int(num_emitted[groups == chosen].sum()))
        self._engines.pause(target, self._now, arrives_s)
        self._engines.give(target, leaving, at_s=arrives_s)
        self._engine_of[int(chosen)] = target
        self._num_groups[busiest] -= 1
        self._num_groups[target] += 1
        self._num_moved += 1

    def _recompute_s(self, num_tokens: int) -> float:
        """Seconds in which an engine recomputes keys and values of so many tokens."""
        fixed_s = self._cluster.speed.fixed_s
        return float(fixed_s[1] + (fixed_s[2] - fixed_s[1]) * num_tokens)

    def _outcome(self) -> Outcome:
        lengths, elapsed_s = self._workload.lengths, self._published_s[-1]
        versions = np.searchsorted(np.array(self._published_s), self._engines.started_s, side="right") - 1
        versions = versions.reshape(lengths.shape)
        staleness = np.concatenate(
            [step - versions[np.array(batch)].ravel() for step, batch in enumerate(self._batches)]
        )
        consumed = np.concatenate([lengths[np.array(batch)].ravel() for batch in self._batches])
        return Outcome(
            step_s=elapsed_s / self._workload.num_steps,
            idle=1 - float(self._engines.busy_s().sum()) / (elapsed_s * self._cluster.num_engines),
            mean_staleness=float(staleness.mean()),
            max_staleness=int(staleness.max()),
            num_stolen=self._dispatcher.num_stolen,
            num_moved=self._num_moved,
            num_waits=self._admission.num_waits if isinstance(self._admission, FlexibleBatches) else 0,
            consumed_lengths=np.sort(consumed),
        )
