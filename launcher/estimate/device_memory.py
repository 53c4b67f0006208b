"""Memory of one device in each phase of a step. Pure.

Trainer and engines that share devices take turns (`megatron_rl.controller.colocation`); the columns are the states of
that sequence:

    rollout   engines sample; `trainer.offload` decides what the trainer keeps on the device
    sleep     engines begin to free memory, nothing is free yet
    onload    the trainer's state comes back; sleeping engines keep their CUDA graphs
    train     forward and backward; torch keeps these blocks until the trainer is offloaded
    update    with states on the host they come to the device; torch gives the blocks of a backward back for them
    save      a checkpoint is copied to host memory
    offload   the trainer begins to free memory
    wake      engines allocate weights beside the trainer's
    publish   weights travel
    wake kv   engines allocate keys and values; with `trainer.offload` = all the trainer's weights have left

Without turns, only rollout, train, update, save and publish differ. Constants without a measurement are named
estimates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.estimate.loads import DeviceLoad
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.publish_memory import device_baselines, device_publish_items
from launcher.estimate.tables import MemoryTable
from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.memory import FURTHER_STATE, GRAPHS, MemoryItem, engine_rank, largest
from rollout.config import EngineConfig

CONTEXT_BYTES = 600 << 20
"""Device memory of each process for context, library handles and workspaces; an estimate."""
COMMUNICATOR_BYTES = 200 << 20
"""Device memory of one NCCL communicator; an estimate."""
RESERVE = 0.05
"""Share lost to fragmentation; an estimate."""

TURNS = ("rollout", "sleep", "onload", "train", "save", "offload", "wake", "publish", "wake kv")
"""Columns of a device that trainer and engines use in turns."""
SIDE_BY_SIDE = ("rollout", "train", "save", "publish")
"""Columns without turns."""
UPDATE = "update"
"""Column after `train`, if an optimizer's states are in host memory else (`trainer.optimizer.states_on_host`)."""
_STATE = ("parameters", "gradients", "optimizer")
_HELD_BY_TRAINER: Mapping[str, Mapping[str, Sequence[str]]] = {
    "none": dict.fromkeys(TURNS, _STATE),
    "optimizer": dict.fromkeys(TURNS, _STATE)
    | dict.fromkeys(("rollout", "sleep", "wake", "publish", "wake kv"), ("parameters",)),
    "all": dict.fromkeys(TURNS, _STATE)
    | dict.fromkeys(("wake", "publish"), ("parameters",))
    | dict.fromkeys(("rollout", "sleep", "wake kv"), ()),
}
"""Trainer state on the device by `trainer.offload` and column."""
_FREED_BY_SLEEP = ("onload", "train", "update", "save", "offload")
"""Columns in which a sleeping engine keeps its CUDA graphs only."""


def device_table(run: PlannedRun, load: DeviceLoad, *, count: int, available_bytes: int) -> MemoryTable:
    """The table of `count` devices that hold `load`."""
    stages = run.trainer_stages if load.num_trainers else ()
    engine = engine_rank(run.spec, run.config.engine, draft_tokens=run.draft_tokens, on_gpu=True)
    phases = {}
    for phase in columns(run):
        items = [
            *largest([trainer_items(stage, run.config.trainer, phase) for stage in stages]),
            *(engine_items(engine, run.config.engine, phase, load.num_engine_ranks) if load.num_engine_ranks else ()),
            *device_baselines(run, load),
            *(device_publish_items(run, load) if phase == "publish" else ()),
            _contexts(run, load),
        ]
        phases[phase] = with_reserve(items)
    return MemoryTable(kind="device", load=load.title, count=count, phases=phases, available_bytes=available_bytes)


def columns(run: PlannedRun) -> Sequence[str]:
    """Columns of the tables of a run."""
    names = TURNS if run.in_turns else SIDE_BY_SIDE
    hosted = _hosted(run.trainer_rank, run.config.trainer)
    return [each for name in names for each in ((name, UPDATE) if hosted and name == "train" else (name,))]


def trainer_items(items: Sequence[MemoryItem], trainer: TrainerConfig, phase: str) -> list[MemoryItem]:
    """Items of a trainer rank on its device in one phase; `items` are those of a stage (`trainer_stages`).

    torch keeps the blocks of a backward pass until the trainer is offloaded, so another process cannot use them. Other
    models are there when the optimizer is (`megatron_rl.trainer.offload`). States that stay in host memory are there in
    an update and in a save. torch then gives back the blocks of a backward, but the samples of the step stay.
    """
    held = _HELD_BY_TRAINER[trainer.offload]["train" if phase == UPDATE else phase]
    held = (*held, *(FURTHER_STATE if "optimizer" in held else ()))
    hosted = _hosted(items, trainer)
    if phase not in (UPDATE, "save"):
        held = tuple(name for name in held if name not in hosted)
    state = [item for item in items if item.what in held]
    passing = [item for item in items if item.what not in (*_STATE, *FURTHER_STATE)]
    if phase == UPDATE or (phase == "save" and hosted):
        passing = [item for item in passing if item.what == "samples of a step"]
    if trainer.offload != "none" and phase not in ("train", UPDATE, "save", "offload"):
        passing = []
    return [replace(item, what=f"trainer {item.what}") for item in (*state, *passing)]


def _hosted(items: Sequence[MemoryItem], trainer: TrainerConfig) -> Sequence[str]:
    """Which of the items lie in host memory but in updates and saves."""
    optimizers = {"optimizer": trainer.optimizer, "critic optimizer": trainer.critic.optimizer}
    return [item.what for item in items if item.what in optimizers and optimizers[item.what].states_on_host]


def engine_items(items: Sequence[MemoryItem], engine: EngineConfig, phase: str, num_ranks: int) -> list[MemoryItem]:
    """Items of the engine ranks on one device in one phase; `items` are those of `engine_rank` on a GPU."""
    held = [item for item in items if item.what != GRAPHS]
    graphs = [item for item in items if item.what == GRAPHS]
    if engine.sleep_level and phase in _FREED_BY_SLEEP:
        held = []
    elif engine.sleep_level and phase in ("wake", "publish"):
        held = [item for item in held if item.what == "weights"]
    return [
        *[replace(item, what=f"engine {item.what}", num_bytes=num_ranks * item.num_bytes) for item in held],
        *[replace(item, num_bytes=num_ranks * item.num_bytes) for item in graphs],
    ]


def with_reserve(items: Sequence[MemoryItem]) -> tuple[MemoryItem, ...]:
    """The items and the share that fragmentation takes."""
    reserve = int(RESERVE * sum(item.num_bytes for item in items))
    return (*items, MemoryItem(what="reserve", num_bytes=reserve, knob=""))


def _contexts(run: PlannedRun, load: DeviceLoad) -> MemoryItem:
    """CUDA contexts of the processes, and their NCCL communicators: one a kind of parallelism, one to publish."""
    publishes = int(run.placement.transport == "nccl")
    communicators = load.num_trainers * (num_communicators(run.config.trainer.parallel) + publishes)
    communicators += load.num_engine_ranks * (int(run.config.engine.tensor_parallel > 1) + publishes)
    return contexts(load.num_trainers + load.num_engine_ranks, communicators)


def num_communicators(parallel: ParallelConfig) -> int:
    """NCCL communicators of a trainer rank: one a kind of parallelism, and one of all ranks."""
    sizes = (parallel.tensor, parallel.pipeline, parallel.data, parallel.expert, parallel.world_size)
    return sum(size > 1 for size in sizes)


def contexts(num_processes: int, communicators: int) -> MemoryItem:
    """CUDA contexts of the processes on a device, and their NCCL communicators."""
    num_bytes = num_processes * CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES
    return MemoryItem(what="contexts and NCCL", num_bytes=num_bytes, knob="")
