"""Decides where each trainer rank and each engine lives: a pure function of the configuration and the node.

Colocated: trainer and engines share cores (they work in turns) or devices. With GPUs, engine ranks are laid
over the devices in order, and a trainer rank takes `trainer_gpu_fraction` of the device of its number; what an engine
reserves on a device is the rest, shared with the other engines there. Disaggregated: engines have the devices
after the trainer's to themselves; on a CPU both sides work at the same time. In a Ray that
we start, devices are named; in a cluster that is joined, Ray chooses.

Invariants: engine ids are 0..n-1; trainer ranks are 0..world-1; on no device do the fractions sum to more than 1.
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
    """Processes that own the history; beside them there is one reader on each node. 0 where no engine drafts."""
    transport: Transport
    """How weights reach the engines."""
    notes: tuple[str, ...]
    """What works, but slower than it could: a sentence each."""

    @property
    def num_actors(self) -> int:
        """Ray actors of the run that take a logical CPU; those of the history take none."""
        return len(self.trainers) + len(self.engines) + 1

    def lines(self) -> list[str]:
        """One human line per slot."""
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

    Raises `ConfigError` where the node has fewer cores or devices than a process needs at one time, or other ones than
    the transport needs.
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
    """One OpenMP pool above the number of cores does not slow down a little, it stalls."""
    if threads > cores:
        raise ConfigError(f"`{key}` = {threads} threads in one process, but this node has {cores} cores; lower it")


def _detour(config: RunConfig, transport: Transport) -> list[str]:
    """Why weights leave the devices, where they do."""
    if transport in ("cuda_ipc", "nccl"):
        return []
    if config.publish.transport != "auto":
        why = f"publish.transport is {transport}"
    elif config.publish.delta:
        why = "publish.delta sends changes over sockets"
    elif config.cluster.address != "local":
        why = "Ray chooses the devices of a cluster that is joined"
    else:
        why = "an engine is on a device where no trainer rank is"
    return [f"weights go through the host ({transport}): {why}"]


def _crowded(config: RunConfig, cores: int) -> list[str]:
    """Trainer and engines that work in turns are each held against the cores alone, others together."""
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
        "placement.mode is disaggregated and nothing is sampled ahead: engines idle while the trainer works, and the "
        "trainer while they do; set planner.overlap"
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
    """Of each rank of an engine."""
    num_ranks = config.engine.tensor_parallel
    first = config.trainer.parallel.world_size if config.placement.mode == "disaggregated" else 0
    return tuple((first + engine * num_ranks + rank) % devices for rank in range(num_ranks))


def _transport(config: RunConfig, engines: Sequence[EngineSlot]) -> Transport:
    """As configured, or the fastest that reaches every engine."""
    asked = config.publish.transport
    world = config.trainer.parallel.world_size
    on_devices = [device for slot in engines for device in slot.devices]
    alone = [device for device in on_devices if device >= world]
    if asked == "cuda_ipc" and (alone or not on_devices):
        why = f"no trainer rank is on device(s) {alone} to hand weights over" if alone else "Ray chooses the devices"
        raise ConfigError(f"`publish.transport` = cuda_ipc: {why}; set it to auto")
    if asked != "auto":
        return asked
    if config.placement.mode == "disaggregated" and on_devices:
        return "nccl"
    if config.cluster.address != "local" or config.publish.delta:
        return "gloo"
    return "cuda_ipc" if on_devices and not alone else "shm"
