"""Assigns trainer ranks and engines to the devices of a node: a pure function of the configuration and the node.

Colocated: trainer and engines share cores (they work in turns) or devices. Engine ranks are assigned to the GPUs in
order. Trainer rank N reserves `trainer_gpu_fraction` of GPU N; the engines on a GPU share the rest of it.
Disaggregated: engines have the GPUs after the trainer's; on CPUs both sides work at the same time. Devices are named
in a Ray cluster that the command starts; in a cluster that it joins, Ray chooses them.

Invariants: engine ids are 0..n-1; trainer ranks are 0..world-1; the fractions on a device sum to at most 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.cluster.node import NodeResources
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from megatron_rl.ranks import TrainerRank, trainer_ranks
from rollout.types import EngineSlot

Transport = Literal["shm", "gloo", "nccl", "cuda_ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All slots of one run on one node."""

    trainers: tuple[TrainerRank, ...]
    engines: tuple[EngineSlot, ...]
    num_scorers: int
    """Processes that score rewards."""
    num_history_shards: int
    """Processes that own the history; each node has one reader besides. 0 if no engine drafts."""
    transport: Transport
    """Transport of weights to the engines."""
    notes: tuple[str, ...]
    """Sentences about settings that work, but slowly."""

    @property
    def num_actors(self) -> int:
        """Ray actors of the run that reserve a logical CPU; history actors reserve none."""
        return len(self.trainers) + len(self.engines) + 1

    def lines(self) -> list[str]:
        """One line of text per slot."""
        trainers = [
            f"trainer {slot.rank}: tp {slot.tensor_rank} pp {slot.pipeline_rank} dp {slot.data_rank}, "
            + (f"{slot.num_gpus:g} GPU" if slot.num_gpus else f"{slot.cpu_threads} CPU thread(s)")
            for slot in self.trainers
        ]
        engines = [
            f"engine {slot.engine_id}: {slot.num_ranks} rank(s), each "
            + (f"{slot.num_gpus:g} GPU" if slot.num_gpus else f"{slot.cpu_cores} CPU core(s)")
            for slot in self.engines
        ]
        return [
            *trainers,
            *engines,
            f"weights: by {self.transport}",
            f"scorers: {self.num_scorers} process(es)",
            *([f"history: {self.num_history_shards} shard(s) and 1 reader"] if self.num_history_shards else []),
            *self.notes,
        ]


def plan(config: RunConfig, node: NodeResources) -> Placement:
    """The placement of `config` on `node`.

    Raises `ConfigError` if the node has fewer cores or devices than a process needs at one time, or not the devices
    that the transport needs.
    """
    devices = len(node.gpu_bytes)
    engine = config.engine
    named = bool(devices) and config.cluster.address == "local"
    if config.publish.transport in ("nccl", "cuda_ipc") and not devices:
        raise ConfigError(
            f"`publish.transport` = {config.publish.transport} moves weights between GPUs, of which this node has "
            "none; set it to auto"
        )
    if devices:
        trainer_gpus, engine_gpus = _gpu_fractions(config, devices)
    else:
        trainer_gpus = engine_gpus = 0.0
        _check_threads("engine.cpu_cores", engine.cpu_cores, node.cpu_cores)
        _check_threads("trainer.cpu_threads", config.trainer.cpu_threads, node.cpu_cores)
    engines = tuple(
        EngineSlot(
            engine_id=number,
            num_ranks=engine.tensor_parallel,
            cpu_cores=engine.cpu_cores,
            num_gpus=engine_gpus,
            devices=_engine_devices(config, devices, number) if named else (),
        )
        for number in range(engine.num_engines)
    )
    transport = _transport(config, engines)
    notes = [*(_detour(config, transport) if devices else _crowded(config, node.cpu_cores)), *_idle(config)]
    return Placement(
        trainers=trainer_ranks(config.trainer.parallel, config.trainer.cpu_threads, trainer_gpus, place=named),
        engines=engines,
        num_scorers=config.reward.num_workers,
        num_history_shards=config.history.num_shards if config.drafts else 0,
        transport=transport,
        notes=tuple(notes),
    )


def _check_threads(key: str, threads: int, cores: int) -> None:
    """Refuses an OpenMP pool with more threads than cores, which stalls."""
    if threads > cores:
        raise ConfigError(f"`{key}` = {threads} threads in one process, but this node has {cores} cores; lower it")


def _detour(config: RunConfig, transport: Transport) -> list[str]:
    """Reason for sending weights through the host; none if they stay on devices."""
    if transport in ("cuda_ipc", "nccl"):
        return []
    if config.publish.transport != "auto":
        why = f"publish.transport is {transport}"
    elif config.publish.delta:
        why = "publish.delta sends changes over sockets"
    elif config.cluster.address != "local":
        why = "Ray chooses the devices of a running cluster"
    else:
        why = "an engine is on a device without a trainer rank"
    return [f"weights go through the host ({transport}): {why}"]


def _crowded(config: RunConfig, cores: int) -> list[str]:
    """Compares threads with cores: trainer and engines together if they work at the same time, else each alone."""
    trainer = config.trainer.parallel.world_size * config.trainer.cpu_threads
    engines = config.engine.num_engines * config.engine.tensor_parallel * config.engine.cpu_cores
    at_once = config.placement.mode == "disaggregated" and config.samples_ahead
    sides = {"trainer and engines": trainer + engines} if at_once else {"trainer": trainer, "engines": engines}
    over = [f"{side} {threads} threads" for side, threads in sides.items() if threads > cores]
    return [f"{' and '.join(over)} on {cores} cores: expect waiting"] if over else []


def _idle(config: RunConfig) -> list[str]:
    if config.placement.mode == "colocated" or config.samples_ahead:
        return []
    return [
        "placement.mode is disaggregated and no step is sampled ahead: engines idle while the trainer works, and the "
        "trainer idles while engines sample; set planner.overlap"
    ]


def _gpu_fractions(config: RunConfig, devices: int) -> tuple[float, float]:
    """Device share of a trainer rank and of an engine rank."""
    world = config.trainer.parallel.world_size
    ranks = config.engine.num_engines * config.engine.tensor_parallel
    if world > devices:
        raise ConfigError(
            f"trainer.parallel needs {world} devices (tensor {config.trainer.parallel.tensor} x pipeline "
            f"{config.trainer.parallel.pipeline} x data {config.trainer.parallel.data}), but the node has {devices}"
        )
    if config.placement.mode == "disaggregated":
        if world + ranks > devices:
            raise ConfigError(
                f"`placement.mode` = disaggregated needs devices for {world} trainer rank(s) and {ranks} engine "
                f"rank(s) that share none, but the node has {devices}; set it to colocated"
            )
        return 1.0, 1.0
    engines_on_a_device = -(-ranks // devices)
    if config.engine.tensor_parallel > devices:
        raise ConfigError(
            f"engine.tensor_parallel = {config.engine.tensor_parallel}, but the node has {devices} devices"
        )
    share = config.cluster.trainer_gpu_fraction
    return share, math.floor(1000 * (1 - share) / engines_on_a_device) / 1000


def _engine_devices(config: RunConfig, devices: int, engine: int) -> tuple[int, ...]:
    """Device of each rank of an engine."""
    num_ranks = config.engine.tensor_parallel
    first = config.trainer.parallel.world_size if config.placement.mode == "disaggregated" else 0
    return tuple((first + engine * num_ranks + rank) % devices for rank in range(num_ranks))


def _transport(config: RunConfig, engines: Sequence[EngineSlot]) -> Transport:
    """The configured transport, or the fastest one that reaches every engine."""
    asked = config.publish.transport
    world = config.trainer.parallel.world_size
    on_devices = [device for slot in engines for device in slot.devices]
    alone = [device for device in on_devices if device >= world]
    if asked == "cuda_ipc" and (alone or not on_devices):
        why = f"device(s) {alone} have no trainer rank that sends weights" if alone else "Ray chooses the devices"
        raise ConfigError(f"`publish.transport` = cuda_ipc: {why}; set it to auto")
    if asked != "auto":
        return asked
    if config.placement.mode == "disaggregated" and on_devices:
        return "nccl"
    if config.cluster.address != "local" or config.publish.delta:
        return "gloo"
    return "cuda_ipc" if on_devices and not alone else "shm"
