"""Starts and ends the processes of a command: Ray, text actors, scorers, engines, trainer ranks.

Engines and trainer ranks start at the same time, because each needs many seconds. `Processes.close` ends every started
process, also after an error: a command leaves no process, no shared memory and no Ray behind.
"""

import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from history.config import HistoryConfig
from history.store.service import HistoryService, Upkeep
from history.store.start import start_history
from history.types import ActorProcess, HistoryPlaces
from launcher.cluster.alive_nodes import other_nodes
from launcher.cluster.node import NodeResources, node_resources
from launcher.cluster.ray_cluster import Reservation, reserve, start_ray
from launcher.cluster.ray_limits import end_ray
from launcher.cluster.text_processes import TextProcesses, start_text_processes
from launcher.config.schema import ClusterConfig
from megatron_rl.ranks import TrainerRank
from megatron_rl.trainer.group import TrainerGroup, start_trainer
from megatron_rl.trainer.messages import TrainerSpec
from rollout.config import RewardConfig
from rollout.data.tokenizer import TokenizerSource
from rollout.engine.actor import EngineActor
from rollout.engine.spec import EngineSpec
from rollout.failures import CallError, DeadlineError
from rollout.pool.engine_call import EngineCall
from rollout.pool.engine_group import EngineGroup
from rollout.processes import NODE, OVERRIDABLE, ProcessEnv, ProcessId, contradictions, on_devices
from rollout.remote_kill import kill_on_nodes
from rollout.transports.shm_files import sweep
from rollout.types import EngineSlot

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Longest wait for an answer of a process that has started; a slower one is considered dead."""

CLOSE_TIMEOUT_S = 15.0
"""Time for an engine or a scorer to end its children."""

Actor = ray.actor.ActorHandle
StartingEngines = tuple[EngineGroup, EngineCall[ProcessId]]
"""Engines, and the call to wait for before they are used (`EngineGroup.finish_start`)."""


@dataclass(slots=True, kw_only=True)
class Processes:
    """The running processes of a command."""

    environment: ProcessEnv
    log_dir: Path | None
    """Folder of `ROLE-RANK.log` files; None leaves output to Ray. In a joined cluster each node has its own folder."""
    nodes: tuple[NodeResources, ...]
    """Nodes of the command; the first one has the text actor and tasks."""
    history: HistoryPlaces | None = None
    """Nodes of the history's actors, by name; None: a reader on every node."""
    reservation: Reservation | None = None
    """Bundles in a joined Ray cluster; None in a cluster that the command has started."""
    started: list[ray.actor.ActorHandle] = field(default_factory=list)
    trainers: list[TrainerGroup] = field(default_factory=list)
    histories: list[HistoryService] = field(default_factory=list)

    def start_text_processes(
        self, tokenizer: TokenizerSource, config: RewardConfig, scorers: Sequence[str]
    ) -> TextProcesses:
        """Start the text actor on the first node, and scorers on these nodes; see `start_text_processes`."""
        variables = [
            self._variables(self.environment.single_threaded(), role)
            for role in ("text-0", *(f"scorer-{number}" for number in range(len(scorers))))
        ]
        ids = None if self.reservation is None else self.reservation.node_ids
        node_ids = ["" if ids is None else ids[node] for node in (self.nodes[0].name, *scorers)]
        return start_text_processes(
            tokenizer,
            config,
            environments=variables,
            node_ids=node_ids,
            num_cpus=self._num_cpus,
            note=self.started.append,
        )

    def start_task(self, function: Callable[..., object], *arguments: object, **options: object) -> ray.ObjectRef:
        """Call a function in a process of its own on the first node; its result stays in Ray's object store."""
        task = ray.remote(function).options(
            num_cpus=self._num_cpus,
            runtime_env={"env_vars": self.environment.single_threaded()},
            scheduling_strategy=self._strategy(self.nodes[0].name),
        )
        ref: ray.ObjectRef = task.remote(*arguments, **options)
        return ref

    def begin_engines(self, specs: Sequence[EngineSpec], slots: Sequence[EngineSlot]) -> StartingEngines:
        """Start engine processes."""
        actor_class: ray.actor.ActorClass = EngineActor
        engines = []
        for spec, slot in zip(specs, slots, strict=True):
            environment = self.environment.engine(threads=slot.cpu_cores) | self._devices(slot)
            variables = self._variables(environment, f"engine-{slot.engine_id}")
            engines.append(
                actor_class.options(
                    num_cpus=self._num_cpus,
                    num_gpus=0,
                    runtime_env={"env_vars": variables},
                    scheduling_strategy=self._strategy(slot.node),
                ).remote(spec)
            )
        self.started += engines
        hosts = [slot.node or socket.gethostname() for slot in slots]
        group = EngineGroup(engines, num_ranks=slots[0].num_ranks, hosts=hosts, first=slots[0].engine_id)
        return group, group.begin_start()

    def start_trainer(self, spec: TrainerSpec, ranks: Sequence[TrainerRank]) -> TrainerGroup:
        """Start all trainer ranks; each loads its part of the model.

        Raises:
            RuntimeError: a rank is not on the node of its placement.
            DeadlineError, CallError: the ranks could not join each other.
        """
        environments = [self._of_rank(spec, rank) for rank in ranks]
        for contradiction in contradictions(environments[0]):
            _log.warning("%s", contradiction)
        strategies = [self._strategy(rank.node) for rank in ranks]
        with _naming_interfaces(len({rank.node for rank in ranks})):
            trainer = start_trainer(spec, environments=environments, strategies=strategies, num_cpus=self._num_cpus)
        self.trainers.append(trainer)
        if self.reservation is not None:
            self.reservation.check("trainer rank", [rank.node for rank in ranks], trainer.ranks.node_ids)
        return trainer

    def check_engines(self, engines: EngineGroup, slots: Sequence[EngineSlot]) -> None:
        """Compare the nodes of started engines with their placement.

        Raises:
            RuntimeError: an engine is not on the node of its placement.
        """
        if self.reservation is not None:
            node_ids = engines.node_ids(timeout_s=START_TIMEOUT_S)
            self.reservation.check("engine", [slot.node for slot in slots], list(node_ids.values()))

    def start_history(
        self, config: HistoryConfig, *, directory: str, fingerprint: str, say: Callable[[str], None]
    ) -> HistoryService:
        """Start the shards and readers of a run; see `history.store.start.start_history`."""
        service = start_history(
            config,
            directory=directory,
            fingerprint=fingerprint,
            environment=self.environment.single_threaded(),
            upkeep=Upkeep(log=say, end_hung=self._end_hung_history),
            places=self._history_places(),
        )
        self.histories.append(service)
        return service

    def _end_hung_history(self, name: str, process: ActorProcess) -> None:
        """Write the stacks of a shard or reader that hangs, and kill it; Ray restarts it."""
        log = "" if self.log_dir is None else str(self.log_dir / f"{name.replace(' ', '-')}.log")
        hung = ProcessId(
            node_id=process.node_id, pid=process.pid, start_ticks=process.start_ticks, log=log, host=process.host
        )
        if folders := kill_on_nodes([hung], stacks=True):
            _log.warning("the stacks of %s are in %s", name, ", ".join(folders))

    def end_history(self, service: HistoryService) -> None:
        """End the shards and readers, and remove their published segments."""
        service.close()
        self.histories.remove(service)

    def end(self, actors: Sequence[ray.actor.ActorHandle]) -> None:
        """End engines, text actors and scorers with their child processes."""
        closing = [actor.close.remote() for actor in actors]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)
            self.started.remove(actor)

    def end_trainer(self, trainer: TrainerGroup) -> None:
        """End all ranks of a trainer."""
        trainer.kill()
        self.trainers.remove(trainer)

    def gone_nodes(self, suspects: Collection[str] = ()) -> list[str]:
        """Names of nodes of the command that have left the joined Ray cluster, or are suspected and do not answer."""
        gone = [] if self.reservation is None else self.reservation.gone(suspects)
        return [node.name for node in self.nodes if node.name in gone]

    def other_nodes(self) -> tuple[NodeResources, ...]:
        """Nodes of the joined Ray cluster that the command does not use and has never used."""
        return () if self.reservation is None else other_nodes(self.reservation.node_ids)

    def use_nodes(
        self, nodes: Sequence[NodeResources], placed: Mapping[str, int], history: HistoryPlaces | None
    ) -> None:
        """From now on use these nodes; those that are new get a bundle for their `placed` processes.

        Readers of the history follow. Errors as for `reserve`.
        """
        assert self.reservation is not None, "a command with a Ray cluster of its own has one node"
        new = [node for node in nodes if node.name not in self.reservation.node_ids]
        if new:
            self.reservation = self.reservation.and_on(reserve(new, placed))
        self.nodes, self.history = tuple(nodes), history
        places = self._history_places()
        for service in self.histories:
            if places is not None:
                service.move_readers(places.readers)

    def close(self) -> None:
        """End everything."""
        for service in list(self.histories):
            self.end_history(service)
        for trainer in list(self.trainers):
            self.end_trainer(trainer)
        if self.started:
            self.end(list(self.started))
        if self.reservation is not None:
            self.reservation.release()

    @property
    def _num_cpus(self) -> int:
        """Logical CPUs of a process; a bundle has reserved them in a joined cluster."""
        return 1 if self.reservation is None else 0

    def _strategy(self, node: str) -> PlacementGroupSchedulingStrategy | None:
        """The bundle of a process on `node`; None on the only node of a cluster that the command has started."""
        return None if self.reservation is None else self.reservation.strategies[node]

    def _of_rank(self, spec: TrainerSpec, rank: TrainerRank) -> dict[str, str]:
        """Variables of a trainer rank."""
        is_deterministic = bool(rank.devices) and bool(spec.config.megatron.get("deterministic_mode"))
        environment = self.environment.trainer_rank(threads=rank.cpu_threads, is_deterministic=is_deterministic)
        return self._variables(environment | self._devices(rank), f"trainer-{rank.rank}")

    def _devices(self, slot: TrainerRank | EngineSlot) -> dict[str, str]:
        """Variables that name the devices of a process."""
        (node,) = [node for node in self.nodes if node.name == slot.node]
        return on_devices([node.gpu_ids[device] if node.gpu_ids else str(device) for device in slot.devices])

    def _history_places(self) -> HistoryPlaces | None:
        """Ray's ids of the nodes of the history's actors."""
        if self.reservation is None or self.history is None:
            return None
        ids = self.reservation.node_ids
        return HistoryPlaces(
            shards=tuple(ids[node] for node in self.history.shards),
            readers=tuple(ids[node] for node in self.history.readers),
        )

    def _variables(self, variables: Mapping[str, str], role: str) -> dict[str, str]:
        log = {"MEGATRON_RL_LOG": str(self.log_dir / f"{role}.log")} if self.log_dir is not None else {}
        overridden = {name: os.environ[name] for name in OVERRIDABLE if name in variables and name in os.environ}
        return {**variables, **overridden, **log}


@contextmanager
def _naming_interfaces(num_nodes: int) -> Iterator[None]:
    """Adds the variables of network interfaces to failures to connect processes on several nodes.

    Gloo and NCCL choose an interface on each node by themselves, whatever address Ray has.
    """
    try:
        yield
    except (DeadlineError, CallError) as error:
        of_network = isinstance(error, DeadlineError) or any(name in str(error) for name in ("Gloo", "gloo", "NCCL"))
        if num_nodes == 1 or not of_network:
            raise
        raise type(error)(
            f"{error}. If these nodes have several networks, start Ray on each with GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME (`cluster.slurm.interface` sets them in a job of `megatron-rl slurm`)",
            error.place,
        ) from error


@contextmanager
def processes(
    cluster: ClusterConfig,
    *,
    num_actors: int,
    log_dir: Path | None,
    nodes: Sequence[NodeResources] = (),
    placed: Mapping[str, int] = MappingProxyType({}),
    history: HistoryPlaces | None = None,
) -> Iterator[Processes]:
    """Join or start Ray for the body of a command, and end everything afterwards.

    Args:
        cluster: the Ray cluster.
        num_actors: processes at one time, in a cluster that the command starts.
        log_dir: folder of the processes' logs; None leaves output to Ray.
        nodes: nodes of a joined cluster, by `run_nodes`.
        placed: number of processes on each of those nodes that the command uses.
        history: nodes of the history's actors in a joined cluster.
    """
    local = cluster.address == "local"
    sweep()
    start_ray(cluster, num_actors=num_actors)
    used = tuple(node for node in nodes if node.name in placed)
    running = Processes(
        environment=ProcessEnv(single_node=local),
        log_dir=log_dir if local or log_dir is None else log_dir / NODE,
        nodes=(node_resources(),) if local else used,
        history=history,
    )
    try:
        if not local:
            running.reservation = reserve(used, placed)
        yield running
    finally:
        running.close()
        end_ray()
        sweep()  # processes of an earlier, killed command may have outlived the sweep above for a moment
