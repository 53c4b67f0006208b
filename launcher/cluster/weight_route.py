"""Chooses the transport of weights from the places of trainer ranks and engines. Pure.

Colocated: `cuda_ipc` if every engine rank shares its device with a trainer rank, otherwise shared memory if every
engine shares its node with one. Over several nodes trainer ranks first exchange the buckets (`ColocatedDelivery`).
Disaggregated: `nccl` between devices. Otherwise `gloo`, which reaches every node.
"""

from collections.abc import Sequence
from typing import Literal

from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from megatron_rl.ranks import TrainerRank
from rollout.types import EngineSlot

Transport = Literal["shm", "gloo", "nccl", "cuda_ipc"]


def choose_transport(config: RunConfig, trainers: Sequence[TrainerRank], engines: Sequence[EngineSlot]) -> Transport:
    """The configured transport, or the fastest one that reaches every engine.

    Raises:
        ConfigError: the configured transport does not reach every engine.
    """
    asked = config.publish.transport
    on_devices = any(rank.devices for rank in trainers)
    alone, far = _without_trainer(trainers, engines)
    if asked in ("nccl", "cuda_ipc") and not on_devices:
        raise ConfigError(
            f"`publish.transport` = {asked} moves weights between GPUs, of which this node has none; set it to auto"
        )
    if asked == "cuda_ipc" and alone:
        raise ConfigError(
            f"`publish.transport` = cuda_ipc: device(s) {_named(alone)} have no trainer rank that sends weights; set "
            "it to auto"
        )
    if asked == "shm" and far:
        raise ConfigError(
            f"`publish.transport` = shm: engine(s) {far} share their node with no trainer rank, and shared memory ends "
            "at the node; set it to auto"
        )
    if asked != "auto":
        return asked
    if config.placement.mode == "disaggregated" and on_devices:
        return "nccl"
    if far or (config.publish.delta and not declines_delta(config, trainers, engines)):
        return "gloo"
    return "cuda_ipc" if on_devices and not alone else "shm"


def declines_delta(config: RunConfig, trainers: Sequence[TrainerRank], engines: Sequence[EngineSlot]) -> bool:
    """Whether deltas are asked for and not chosen, because they would be slower than full publishes.

    Inside one machine bytes are copied faster than changed ones are found. A configured socket transport is obeyed.
    """
    nodes = {rank.node for rank in trainers} | {slot.node for slot in engines}
    return config.publish.delta and config.publish.transport == "auto" and len(nodes) == 1


def declined_delta(transport: Transport) -> str:
    """The line that says so."""
    return (
        f"`publish.delta` = true is not used: on one machine, sending all weights by {transport} is faster than "
        "finding what changed; name publish.transport (gloo, or nccl if engines have GPUs of their own) to send changes"
    )


def detour(config: RunConfig, transport: Transport) -> list[str]:
    """Reason for sending weights through the host; none if they stay on devices."""
    if transport in ("cuda_ipc", "nccl"):
        return []
    if config.publish.transport != "auto":
        why = f"publish.transport is {transport}"
    elif config.publish.delta:
        why = "publish.delta sends changes over sockets"
    else:
        why = "an engine is on a device without a trainer rank"
    return [f"weights go through the host ({transport}): {why}"]


def homes(trainers: Sequence[TrainerRank], engines: Sequence[EngineSlot]) -> tuple[tuple[int, ...], ...]:
    """By engine and rank, the trainer rank that hands weights over: the one on its device, or one on its node.

    Equal ranks of the engines on a device, or without devices on a node, get the same trainer rank and share its
    memory. Engines on different devices have different trainer ranks, each with a copy of its own.
    """
    on_node: dict[str, list[int]] = {}
    for rank in trainers:
        on_node.setdefault(rank.node, []).append(rank.rank)
    on_device = {(rank.node, device): rank.rank for rank in trainers for device in rank.devices}
    return tuple(
        tuple(
            on_device.get((slot.node, device), on_node[slot.node][number % len(on_node[slot.node])])
            for number, device in enumerate(slot.devices or (-1,) * slot.num_ranks)
        )
        for slot in engines
    )


def _without_trainer(
    trainers: Sequence[TrainerRank], engines: Sequence[EngineSlot]
) -> tuple[list[tuple[str, int]], list[int]]:
    """Devices of engine ranks without a trainer rank, and engines on nodes without one."""
    with_trainer = {(rank.node, device) for rank in trainers for device in rank.devices}
    nodes = {rank.node for rank in trainers}
    devices = dict.fromkeys((slot.node, device) for slot in engines for device in slot.devices)
    alone = [place for place in devices if place not in with_trainer]
    return alone, [slot.engine_id for slot in engines if slot.node not in nodes]


def _named(places: Sequence[tuple[str, int]]) -> str:
    if not any(node for node, _ in places):
        return str([device for _, device in places])
    return ", ".join(f"{device} of {node}" for node, device in places)
