"""The controller's view of the trainer: typed calls on all ranks at once.

Every method of a trainer rank is SPMD: it enters collectives, so all ranks must call it or none. A call therefore goes
to all ranks together and has one deadline (`SpmdGroup`). If a rank fails or is late, its peers may wait for ever in a
collective. The whole group is then killed, and the error names the failed or late ranks. Nothing is repaired in place:
a new group starts from the checkpoint (`launcher.recovery.trainer`).

A call whose ranks leave no marks of progress for `trainer.progress_timeout_s` ends in the same way (`RankWatch`).
Before late ranks are killed, the stacks of all ranks are written (`rollout.stacks`).

Must not import torch: it runs in the controller's process.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from history.patience import LOOK_S, Patience
from megatron_rl.batching.batch import TrainBatch
from megatron_rl.batching.sft_batch import SftBatch
from megatron_rl.ranks import trainer_ranks
from megatron_rl.trainer.actor import TrainerActor
from megatron_rl.trainer.messages import ProbeResult, StagedWeights, StepResult, TrainerProof, TrainerSpec
from megatron_rl.trainer.rank_watch import RankWatch
from rollout.failures import CallError, DeadlineError, Place, ProcessLostError, brief, node_of, ranges
from rollout.processes import ProcessId
from rollout.remote_kill import kill_on_nodes
from rollout.transports.base import GroupChannel, StoreAddress
from rollout.weights.fingerprint_sums import add_up
from rollout.weights.manifest import Required

if TYPE_CHECKING:
    from megatron_rl.trainer.offload import Part

NOTICED_S = 1.0
"""Longest time until the end of a rank is noticed while its peers still work."""
PEER_DEATH_S = 2.0
"""After a rank raised, time to learn of a peer's death, which would be the cause of the error."""
LOOK_EVERY_S = 30.0
"""Interval at which idle ranks are asked whether they live."""
IDLE_TIMEOUT_S = 120.0
"""A rank that does nothing and has not answered for so long hangs."""


class SpmdGroup:
    """Ray actors in rank order. Errors contain `name`."""

    def __init__(self, name: str, actors: Sequence[ray.actor.ActorHandle], *, timeout_s: float) -> None:
        self._name = name
        self._actors = tuple(actors)
        self._timeout_s = timeout_s
        self._processes: tuple[ProcessId, ...] = ()
        self._watch: RankWatch | None = None
        self._look: tuple[list[ray.ObjectRef], float] = ([], -LOOK_EVERY_S)
        """Calls that ask whether ranks live, and when they were made."""
        self._unread: dict[ray.ObjectRef, int] = {}
        """Those that had no answer yet, with their ranks. An answer is read once, because there may be hundreds."""
        self._checked_s = -LOOK_EVERY_S
        self._idle_s = 0.0
        """Time for which these calls were waited for."""

    @property
    def num_ranks(self) -> int:
        """Actors of the group."""
        return len(self._actors)

    def call(self, method: str, *args: object, timeout_s: float | None = None) -> list[object]:
        """Call `method(*args)` on every rank; results in rank order.

        The group is dead after any error.

        Raises:
            CallError: a rank raised; the error names it.
            ProcessLostError: a rank's process ended.
            DeadlineError: a rank had not returned after `timeout_s`.
        """
        return self.wait(self.begin(method, *args), method, timeout_s=timeout_s)

    def begin(self, method: str, *args: object) -> list[ray.ObjectRef]:
        """Start `method(*args)` on every rank without waiting; pass the result to `wait`."""
        return self.begin_each(method, [args] * len(self._actors))

    def begin_each(self, method: str, args: Sequence[tuple[object, ...]]) -> list[ray.ObjectRef]:
        """The same with arguments for each rank."""
        return [getattr(actor, method).remote(*given) for actor, given in zip(self._actors, args, strict=True)]

    def wait(self, refs: Sequence[ray.ObjectRef], method: str, *, timeout_s: float | None = None) -> list[object]:
        """Results of a call that `begin` started, in rank order; errors as for `call`."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        patience = Patience(limit_s)
        pending, ranks = list(refs), {ref: rank for rank, ref in enumerate(refs)}
        if self._watch is not None:
            self._watch.begin()
        look_every_s = min(NOTICED_S, LOOK_S if self._watch is None else self._watch.look_every_s)
        while pending:
            # a look at hundreds of ranks is expensive, so there is none for each rank that ends
            look_s = patience.look_s(look_every_s)
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=look_s, fetch_local=False)
            for ref in done:
                self._raise_if_failed(refs, ranks[ref], method)
            late = [ranks[ref] for ref in pending]
            if pending and patience.is_over() and not done:
                self._end_late(late, method, f"had not returned after {limit_s:.0f} s, for which the controller waited")
            if pending and self._watch is not None and self._watch.hangs(late):
                silent_s = self._watch.timeout_s
                self._end_late(late, method, f"made no progress for {silent_s:.0f} s (`trainer.progress_timeout_s`)")
        return list(ray.get(list(refs)))

    def check_idle(self) -> None:
        """Notice a rank that has died or hangs. Call it now and then while no other call runs; it never waits.

        Raises:
            ProcessLostError: a rank's process ended.
            DeadlineError: a rank has not answered for `IDLE_TIMEOUT_S`.
        """
        (asking, asked_s), now_s = self._look, time.monotonic()
        if self._unread:
            unread = list(self._unread)
            done, _ = ray.wait(unread, num_returns=len(unread), timeout=0, fetch_local=False)
            for ref in done:
                self._raise_if_failed(asking, self._unread.pop(ref), "process")
        self._idle_s = self._idle_s + min(now_s - self._checked_s, 2 * LOOK_S) if self._unread else 0.0
        self._checked_s = now_s
        if self._idle_s > IDLE_TIMEOUT_S:
            why = f"had not returned after {IDLE_TIMEOUT_S:.0f} s, for which the controller waited"
            self._end_late(list(self._unread.values()), "process", why)
        if not self._unread and now_s - asked_s >= LOOK_EVERY_S:
            self._look = self.begin("process"), now_s
            self._unread = {ref: rank for rank, ref in enumerate(self._look[0])}

    def _end_late(self, late: Sequence[int], method: str, why: str) -> NoReturn:
        """Kill the group, because these ranks are late. The error names those for which the others wait, if known."""
        report = None if self._watch is None else self._watch.report(late)
        host = self._processes[late[0]].host if self._processes else ""
        named, node, marks = (
            (tuple(late), host, "") if report is None else (report.suspects, report.node, f": {report.text}")
        )
        folders = kill_on_nodes(self._processes, stacks=True)
        self.kill()
        stacks = f"their stacks are in {', '.join(folders)}" if folders else "the logs of its ranks have their stacks"
        raise DeadlineError(
            f"{self._name}.{method}: rank(s) [{ranges(named)}] of {self.num_ranks} {why}{marks}; "
            f"the group was killed, and {stacks}",
            Place(role=self._name, ranks=named, node=node),
        )

    def _raise_if_failed(self, refs: Sequence[ray.ObjectRef], rank: int, method: str) -> None:
        try:
            ray.get(refs[rank])
        except ray.exceptions.RayError as error:
            failed, reason = self._first_death(refs, rank, error)
            self.kill_and_wait()
            kind = ProcessLostError if isinstance(reason, ray.exceptions.RayActorError) else CallError
            raise kind(
                f"{self._name}.{method} failed on rank {failed} of {self.num_ranks}: {brief(reason)}",
                Place(role=self._name, ranks=(failed,), node=node_of(reason)),
            ) from reason

    def _first_death(
        self, refs: Sequence[ray.ObjectRef], rank: int, error: ray.exceptions.RayError
    ) -> tuple[int, ray.exceptions.RayError]:
        """Rank and error of a process that ended, if any, because it makes the collectives of its peers fail."""
        if isinstance(error, ray.exceptions.RayActorError):
            return rank, error
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=PEER_DEATH_S, fetch_local=False)
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError as death:
                return refs.index(ref), death
            except ray.exceptions.RayError:
                continue
        return rank, error

    def learn_processes(self, *, progress_timeout_s: float | None = None) -> None:
        """Ask each rank for its process (`TrainerActor.process`), to kill it if it hangs.

        With `progress_timeout_s`, ranks that leave no mark for so long during a call hang.
        """
        self._processes = tuple(_results(self.call("process"), ProcessId))
        if progress_timeout_s is not None:
            self._watch = RankWatch(self._processes, progress_timeout_s)

    @property
    def node_ids(self) -> list[str]:
        """Ray's id of the node of each rank; empty before `learn_processes`."""
        return [process.node_id for process in self._processes]

    def kill(self) -> None:
        """End every rank at once, without waiting."""
        if self._watch is not None:
            self._watch.close()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def kill_and_wait(self) -> None:
        """End every rank; returns when their processes have ended and their devices are free."""
        self.kill()
        kill_on_nodes(self._processes, stacks=False)


Result = TypeVar("Result")


class TrainerGroup:
    """All trainer ranks of a run; errors of any call kill the group (see `SpmdGroup`)."""

    def __init__(self, ranks: SpmdGroup, *, data_ranks: Sequence[int]) -> None:
        """`data_ranks`: the data-parallel rank of each rank."""
        self.ranks = ranks
        self._data_ranks = tuple(data_ranks)
        self._unstaging: Sequence[ray.ObjectRef] = ()
        self._proving: Sequence[ray.ObjectRef] = ()
        self._asked: Sequence[ray.ObjectRef] = ()
        """Calls that ask whether a save is written."""

    def uses_te_layer_names(self) -> bool:
        """Whether the ranks' parameters bear Transformer Engine's names."""
        return _results(self.ranks.call("uses_te_layer_names"), bool)[0]

    def train(self, batch: TrainBatch) -> StepResult:
        """Train on the batch of one step. Returns the result of the last rank, which is on the last pipeline stage."""
        parts = {rank: ray.put(batch.of_rank(rank)) for rank in set(self._data_ranks)}
        training = self.ranks.begin_each("train", [(parts[rank],) for rank in self._data_ranks])
        return _results(self.ranks.wait(training, "train"), StepResult)[-1]

    def load_rows(self, rows: ray.ObjectRef) -> None:
        """Give every rank the rows of SFT (an `SftRows` in the object store)."""
        self.ranks.call("load_rows", rows)

    def sft_step(self, batch: SftBatch) -> StepResult:
        """One optimizer step of SFT."""
        return _results(self.ranks.call("sft_step", batch), StepResult)[-1]

    def open_stores(self, first_rank: int, num_engines: int) -> list[StoreAddress]:
        """Stores for process groups, one per engine, on the node of `first_rank`."""
        addresses = _results(self.ranks.call("open_stores", first_rank, num_engines), list)
        return list(addresses[first_rank])

    def attach_group(self, engine: int, channel: GroupChannel) -> list[str]:
        """Join the process group of an engine on every rank that sends; by rank, why it is not complete, or empty."""
        return _results(self.ranks.call("attach_group", engine, channel), str)

    def plan_publishes(self, required: Sequence[Required]) -> None:
        """Plan publishes on every rank; `required` as in `plan_reshard`."""
        self.ranks.call("plan_publishes", ray.put(list(required)))

    def stage(self, weight_version: int, *, timeout_s: float, with_sums: bool = True) -> list[StagedWeights]:
        """Quantise and stage a publish on every rank; `with_sums` as in `WeightPacker.send`."""
        self.finish_unstage(timeout_s=timeout_s)
        return _results(self.ranks.call("stage", weight_version, with_sums, timeout_s=timeout_s), StagedWeights)

    def unstage(self) -> None:
        """Start releasing the staged publish on every rank, without waiting.

        `finish_unstage` or the next `stage` raises its errors.
        """
        self._unstaging = self.ranks.begin("unstage")

    def finish_unstage(self, *, timeout_s: float) -> None:
        """Wait until every rank has released what the last `unstage` releases; engines may then use its memory."""
        self.ranks.wait(self._unstaging, "unstage", timeout_s=timeout_s)
        self._unstaging = ()

    def begin_proof(self, token_ids: Sequence[int]) -> None:
        """Start computing what engines must find, on every rank, after `stage`; `finish_proof` waits for it."""
        self._proving = self.ranks.begin("proof", list(token_ids))

    def finish_proof(self, *, timeout_s: float) -> TrainerProof:
        """Sums of all ranks together, and the probe's log-probabilities, of the last `begin_proof`."""
        parts = _results(self.ranks.wait(self._proving, "proof", timeout_s=timeout_s), TrainerProof)
        probe = next((part.probe for part in parts if part.probe is not None), None)
        return TrainerProof(sums=add_up(part.sums for part in parts), probe=probe)

    def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> ProbeResult:
        """Log-probabilities of the probe prompt under the trainer's weights."""
        results = self.ranks.call("probe", list(token_ids), timeout_s=timeout_s)
        return _results([result for result in results if result is not None], ProbeResult)[0]

    def offload(self, parts: "Sequence[Part]") -> None:
        """Move parts of every rank to host memory; see `Offloader`."""
        self.ranks.call("offload", tuple(parts))

    def onload(self) -> None:
        """Move everything in host memory back to the devices."""
        self.ranks.call("onload")

    def begin_save(self, path: str, *, background: bool) -> None:
        """Start writing the trainer's part of a checkpoint; `finish_save` completes it.

        With `background` the trainer may train meanwhile; without it nothing but `finish_save` may follow.
        """
        self._asked = ()
        self.ranks.call("begin_save", path, background)

    def save_is_written(self, *, wait_s: float) -> bool:
        """Whether all ranks have written their files, or failed to, so that `finish_save` does not wait.

        False, too, if the ranks do not answer within `wait_s`, because they train; the next call gets that answer.
        """
        self._asked = self._asked or self.ranks.begin("save_seconds")
        _, pending = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=wait_s, fetch_local=False)
        if pending:
            return False
        asked, self._asked = self._asked, ()
        return None not in self.ranks.wait(asked, "save_seconds")

    def finish_save(self) -> float:
        """Wait for the files and complete the checkpoint; returns the seconds from the begin to the last file.

        Raises:
            CallError: a rank could not write a file.
        """
        return max(_results(self.ranks.call("finish_save"), float))

    def load(self, path: str) -> None:
        """Restore the trainer's part of a checkpoint."""
        self.ranks.call("load", path)

    def export(self, path: str) -> None:
        """Write the policy as a Hugging Face directory."""
        self.ranks.call("export", path)

    def kill(self) -> None:
        """End every rank."""
        self.ranks.kill()


def start_trainer(
    spec: TrainerSpec,
    *,
    environments: Sequence[Mapping[str, str]],
    strategies: Sequence[PlacementGroupSchedulingStrategy | None],
    num_cpus: int,
) -> TrainerGroup:
    """Start one actor per rank; returns after all have joined and loaded their weights.

    Args:
        spec: what every rank trains.
        environments: environment of each rank's process; it names the rank's devices.
        strategies: where Ray starts each rank; None on the only node.
        num_cpus: logical CPUs of a rank.
    """
    remote = ray.remote(TrainerActor)
    actors = [
        remote.options(
            num_cpus=num_cpus,
            num_gpus=0,
            runtime_env={"env_vars": dict(environment)},
            scheduling_strategy=strategy,
        ).remote(spec, rank)
        for rank, (environment, strategy) in enumerate(zip(environments, strategies, strict=True))
    ]
    group = SpmdGroup("trainer", actors, timeout_s=spec.config.timeout_s)
    group.learn_processes(progress_timeout_s=spec.config.progress_timeout_s)
    (address, *_) = group.call("rendezvous")
    assert isinstance(address, tuple)
    group.call("join", *address)
    ranks = trainer_ranks(spec.config.parallel, cpu_threads=1)
    return TrainerGroup(group, data_ranks=[rank.data_rank for rank in ranks])


def _results(results: Sequence[object], kind: type[Result]) -> list[Result]:
    checked = [result for result in results if isinstance(result, kind)]
    assert len(checked) == len(results), f"a rank returned something else than {kind.__name__}"
    return checked
