"""How many trainer groups and engines each node gets, and the refusal of runs that do not fit. Pure.

Colocated engines take devices of trainer ranks if all engines fit there without sharing. Otherwise they also take the
other devices, and finally share devices. Disaggregated engines share no device with another rank; they take whole nodes
after the trainer's if those suffice, and otherwise every device that the trainer leaves.
"""

from collections.abc import Sequence

from launcher.cluster.node_assignment import NodeUse, fill_in_order, share_in_order, spread_evenly
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from megatron_rl.config import ParallelConfig, TrainerConfig
from rollout.config import EngineConfig


def trainer_groups(trainer: TrainerConfig, uses: Sequence[NodeUse]) -> list[int]:
    """Tensor-parallel groups of a trainer on each node.

    Raises:
        ConfigError: the nodes have too few devices, or too few inside a node.
    """
    parallel = trainer.parallel
    num_groups = parallel.pipeline * parallel.data
    if not uses[0].on_devices:
        return share_in_order(num_groups, [use.size for use in uses])
    rooms = [use.size // parallel.tensor for use in uses]
    _check_devices(parallel, uses, sum(rooms))
    return fill_in_order(num_groups, rooms)


def trainer_nodes(config: RunConfig, uses: Sequence[NodeUse]) -> list[NodeUse]:
    """Nodes that may get trainer ranks: all, or some of several nodes if the run is disaggregated on cores.

    Those are as many as the trainer's share of all cores that trainer and engines use.
    """
    trainer, engine = config.trainer, config.engine
    num_nodes = len(uses)
    if config.placement.mode == "colocated" or uses[0].on_devices or num_nodes == 1:
        return list(uses)
    cores = trainer.parallel.world_size * trainer.cpu_threads
    engine_cores = engine.num_engines * engine.tensor_parallel * engine.cpu_cores
    share = max(num_nodes * cores // (cores + engine_cores), num_nodes - engine.num_engines, 1)
    return list(uses[: min(share, trainer.parallel.pipeline * trainer.parallel.data, num_nodes - 1)])


def engine_counts(config: RunConfig, uses: Sequence[NodeUse]) -> list[int]:
    """Engines of a run on each node; `uses` have the trainer ranks.

    Raises:
        ConfigError: the nodes have too few devices, or too few inside a node.
    """
    engine, apart, on_devices = config.engine, config.placement.mode == "disaggregated", uses[0].on_devices
    trainer_size = 1 if on_devices else config.trainer.cpu_threads
    engine_size = engine.tensor_parallel * (1 if on_devices else engine.cpu_cores)
    sizes = [use.size for use in uses]
    taken = [trainer_size * use.num_trainers for use in uses]
    whole = [0 if use.num_trainers else use.size for use in uses]
    left = [max(0, size - trainers) for size, trainers in zip(sizes, taken, strict=True)]
    for offered in (whole, left) if apart else (taken, sizes):
        rooms = [offer // engine_size for offer in offered]
        if sum(rooms) >= engine.num_engines:
            return spread_evenly(engine.num_engines, offered, rooms)
        if apart and any(whole) and not on_devices:
            return spread_evenly(engine.num_engines, whole)
    if apart and on_devices:
        raise ConfigError(_no_room_apart(config, uses))
    return shared_devices(engine, uses)


def shared_devices(engine: EngineConfig, uses: Sequence[NodeUse]) -> list[int]:
    """Engines on each node if ranks share devices or cores.

    Raises:
        ConfigError: no node has as many devices as an engine has ranks.
    """
    if not uses[0].on_devices:
        return spread_evenly(engine.num_engines, [use.size for use in uses])
    most = max(use.size for use in uses)
    if engine.tensor_parallel > most and len(uses) == 1:
        raise ConfigError(f"engine.tensor_parallel = {engine.tensor_parallel}, but the node has {most} devices")
    if engine.tensor_parallel > most:
        raise ConfigError(
            f"`engine.tensor_parallel` = {engine.tensor_parallel}, but a node has at most {most} devices, and an "
            "engine stays inside a node; lower it"
        )
    return spread_evenly(engine.num_engines, [use.size if use.size >= engine.tensor_parallel else 0 for use in uses])


def _check_devices(parallel: ParallelConfig, uses: Sequence[NodeUse], num_rooms: int) -> None:
    """Refuse a trainer that needs more devices, or more groups of them, than the nodes have."""
    total, num_groups = sum(use.size for use in uses), parallel.pipeline * parallel.data
    if parallel.world_size > total:
        raise ConfigError(
            f"trainer.parallel needs {parallel.world_size} devices (tensor {parallel.tensor} x pipeline "
            f"{parallel.pipeline} x data {parallel.data}), but {_have(uses, total)}"
        )
    if num_groups > num_rooms:
        raise ConfigError(
            f"`trainer.parallel.tensor` = {parallel.tensor} devices inside one node: {len(uses)} nodes of "
            f"{_sizes(uses)} devices have room for {num_rooms} such groups, but pipeline {parallel.pipeline} x data "
            f"{parallel.data} = {num_groups} are needed; lower `trainer.parallel.tensor` to a divisor of a node's "
            "devices, or add nodes"
        )


def _no_room_apart(config: RunConfig, uses: Sequence[NodeUse]) -> str:
    world, engine = config.trainer.parallel.world_size, config.engine
    total, ranks = sum(use.size for use in uses), engine.num_engines * engine.tensor_parallel
    needs = (
        f"`placement.mode` = disaggregated needs devices for {world} trainer rank(s) and {ranks} engine rank(s) that "
        "share none, but"
    )
    if world + ranks > total:
        return f"{needs} {_have(uses, total)}; set it to colocated"
    return (
        f"{needs} the trainer leaves too few devices inside single nodes for {engine.num_engines} engine(s) of "
        f"{engine.tensor_parallel} (nodes of {_sizes(uses)} devices); lower `engine.tensor_parallel`, or add nodes"
    )


def _have(uses: Sequence[NodeUse], total: int) -> str:
    return f"the node has {total}" if len(uses) == 1 else f"the {len(uses)} nodes have {total}"


def _sizes(uses: Sequence[NodeUse]) -> str:
    return " or ".join(map(str, sorted({use.size for use in uses})))
