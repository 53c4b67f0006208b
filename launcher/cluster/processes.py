"""Starts and ends the processes of a command: Ray, text actors, engines, trainer ranks.

Engines and trainer ranks start at the same time, because each needs many seconds. `Processes.close` ends every started
process, also after an error: a command leaves no process, no shared memory and no Ray behind.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import ray

from history.config import HistoryConfig
from history.store.service import HistoryService, start_history
from launcher.cluster.node import RAY_SETTINGS
from launcher.config.schema import ClusterConfig
from launcher.errors import Terminated
from megatron_rl.ranks import TrainerRank
from megatron_rl.trainer.group import TrainerGroup, start_trainer
from megatron_rl.trainer.spec import TrainerSpec
from rollout.config import RewardConfig
from rollout.data.tokenizer import TokenizerFacts
from rollout.engine.actor import EngineActor
from rollout.engine.spec import EngineSpec
from rollout.failures import DeadlineError, Place
from rollout.pool.engine_group import EngineCall, EngineGroup
from rollout.processes import HEAP, NODE, ProcessEnv, on_devices
from rollout.rewards.text_actor import TextActor
from rollout.transports.shm_files import sweep
from rollout.types import EngineSlot

START_TIMEOUT_S = 600.0
"""Longest start of a process; a slower one is considered dead."""

CLOSE_TIMEOUT_S = 15.0
"""Time for an engine or a text actor to end its children."""

_POLL_S = 0.5

Actor = ray.actor.ActorHandle
StartingEngines = tuple[EngineGroup, EngineCall[None]]
"""Engines, and the call to wait for before they are used (`EngineGroup.wait`)."""


@dataclass(slots=True, kw_only=True)
class Processes:
    """The running processes of a command."""

    environment: ProcessEnv
    log_dir: Path | None
    """Folder of `ROLE-RANK.log` files; None leaves output to Ray. In a joined cluster each node has its own folder."""
    num_gpus_per_engine_rank: float
    """Devices per rank of an engine without a trainer on the same device; 0 on CPUs."""
    started: list[ray.actor.ActorHandle] = field(default_factory=list)
    trainers: list[TrainerGroup] = field(default_factory=list)
    histories: list[HistoryService] = field(default_factory=list)

    def start_text_actor(self, model: str, config: RewardConfig) -> tuple[ray.actor.ActorHandle, TokenizerFacts]:
        """Start the process with the tokenizer and the reward workers."""
        actor_class: ray.actor.ActorClass = TextActor
        variables = self._variables(self.environment.single_threaded(), "scorer-0")
        text_actor = actor_class.options(num_cpus=1, runtime_env={"env_vars": variables}).remote(model, config)
        self.started.append(text_actor)
        try:
            facts: TokenizerFacts = ray.get(text_actor.start.remote(), timeout=START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(
                f"the controller waited {START_TIMEOUT_S:.0f} s for the scorer to load tokenizer and reward function",
                Place(role="scorer", ranks=(0,)),
            ) from error
        return text_actor, facts

    def begin_engines(self, specs: Sequence[EngineSpec], slots: Sequence[EngineSlot]) -> StartingEngines:
        """Start engine processes."""
        actor_class: ray.actor.ActorClass = EngineActor
        engines = []
        for spec, slot in zip(specs, slots, strict=True):
            environment = self.environment.engine(threads=slot.cpu_cores) | on_devices(slot.devices)
            variables = self._variables(environment, f"engine-{slot.engine_id}")
            num_gpus = 0 if slot.devices else slot.num_gpus * slot.num_ranks
            engines.append(
                actor_class.options(num_cpus=1, num_gpus=num_gpus, runtime_env={"env_vars": variables}).remote(spec)
            )
        self.started += engines
        group = EngineGroup(engines, num_ranks=slots[0].num_ranks)
        return group, group.begin_start()

    def start_trainer(self, spec: TrainerSpec, ranks: Sequence[TrainerRank]) -> TrainerGroup:
        """Start all trainer ranks; each loads its part of the model."""
        environments = [
            self._variables(
                self.environment.trainer_rank(threads=rank.cpu_threads) | on_devices(rank.devices),
                f"trainer-{rank.rank}",
            )
            for rank in ranks
        ]
        trainer = start_trainer(spec, ranks, environments=environments)
        self.trainers.append(trainer)
        return trainer

    def start_history(
        self, config: HistoryConfig, *, directory: str, fingerprint: str, say: Callable[[str], None]
    ) -> HistoryService:
        """Start the shards and readers of a run; see `history.store.service.start_history`."""
        service = start_history(
            config,
            directory=directory,
            fingerprint=fingerprint,
            environment=self.environment.single_threaded(),
            log=say,
        )
        self.histories.append(service)
        return service

    def end_history(self, service: HistoryService) -> None:
        """End the shards and readers, and remove their published segments."""
        service.close()
        self.histories.remove(service)

    def end(self, actors: Sequence[ray.actor.ActorHandle]) -> None:
        """End engines and text actors with their child processes."""
        closing = [actor.close.remote() for actor in actors]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)
            self.started.remove(actor)

    def end_trainer(self, trainer: TrainerGroup) -> None:
        """End all ranks of a trainer."""
        trainer.kill()
        self.trainers.remove(trainer)

    def close(self) -> None:
        """End everything."""
        for service in list(self.histories):
            self.end_history(service)
        for trainer in list(self.trainers):
            self.end_trainer(trainer)
        if self.started:
            self.end(list(self.started))

    def _variables(self, variables: Mapping[str, str], role: str) -> dict[str, str]:
        log = {"MEGATRON_RL_LOG": str(self.log_dir / f"{role}.log")} if self.log_dir is not None else {}
        overridden = {name: os.environ[name] for name in HEAP.keys() & variables.keys() & os.environ.keys()}
        return {**variables, **overridden, **log}


@contextmanager
def processes(cluster: ClusterConfig, *, num_actors: int, log_dir: Path | None) -> Iterator[Processes]:
    """Join or start Ray for the body of a command, and end everything afterwards."""
    local = cluster.address == "local"
    sweep()
    _start_ray(cluster, num_actors=num_actors)
    if not local:
        _wait_for_nodes(cluster.min_nodes)
    running = Processes(
        environment=ProcessEnv(single_node=local),
        log_dir=log_dir if local or log_dir is None else log_dir / NODE,
        num_gpus_per_engine_rank=1.0 if ray.cluster_resources().get("GPU") else 0.0,
    )
    try:
        yield running
    finally:
        running.close()
        ray.shutdown()


def _start_ray(cluster: ClusterConfig, *, num_actors: int) -> None:
    """Join or start Ray; if the start fails or is interrupted, end Ray's processes.

    Raises:
        Terminated: SIGTERM came during the start. Ray installs its own handler until it has started.
        DeadlineError: Ray's own processes did not answer in time.
    """
    local = cluster.address == "local"
    on_termination = signal.getsignal(signal.SIGTERM)
    before = psutil.Process().children()
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # an error is reported once, to its waiting caller
    try:
        ray.init(
            address=cluster.address,
            include_dashboard=False if local else None,
            num_cpus=num_actors if local else None,
            object_store_memory=cluster.object_store_bytes if local else None,
            log_to_driver=False,
            logging_level="ERROR",
            namespace="megatron_rl",
            _system_config=RAY_SETTINGS if local else None,
        )
    except BaseException as error:  # after a failed start Ray does not end its own processes
        ray.shutdown()
        _kill([child for child in psutil.Process().children() if child not in before])
        if isinstance(error, SystemExit):
            raise Terminated from error
        if "timed out during startup" in str(error):
            raise DeadlineError(
                f"Ray did not start in time; end other programs of this machine and try again: {error}"
            ) from error
        raise
    finally:
        if threading.current_thread() is threading.main_thread() and on_termination is not None:
            signal.signal(signal.SIGTERM, on_termination)


def _wait_for_nodes(num_nodes: int) -> None:
    """Wait until so many nodes are in the cluster.

    Raises:
        DeadlineError: they are not after `START_TIMEOUT_S`.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while (joined := sum(bool(node["Alive"]) for node in ray.nodes())) < num_nodes:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the controller waited {START_TIMEOUT_S:.0f} s for {num_nodes} nodes (`cluster.min_nodes`) to join "
                f"Ray, {joined} have; see the log of Ray on the others"
            )
        time.sleep(_POLL_S)


def _kill(roots: Sequence[psutil.Process]) -> None:
    """Kill processes and all their descendants."""
    for root in roots:
        try:
            family = [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
