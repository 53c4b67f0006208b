"""Estimate of the seconds in which weights travel to the engines, and of switching shared devices. Pure.

* `cuda_ipc`: trainer ranks exchange buckets until each device has the shards of its engine ranks. A bucket enters each
  node once, by the network cards of all its devices (`rollout.transports.node_routes`), and is passed on over NVLink.
* `nccl`: a chain of engines; a rank passes a bucket on while it receives the next one.
* `shm`, `gloo`: through the host, at the bandwidth of PCIe; over nodes also through the network.

Quantising reads each weight twice (scales, codes); loading writes a shard and reads it once more. Switching moves state
over PCIe: what `trainer.offload` moves goes to the host and comes back.
"""

from dataclasses import dataclass

from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.publish_memory import largest_bucket_bytes
from launcher.estimate.roofline import Assumptions
from megatron_rl.weights.state_sizes import rank_state


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishEstimate:
    """One publish, and the switches of a step."""

    quantise_s: float
    travel_s: float
    load_s: float
    overhead_s: float
    """As stated."""
    switch_s: float
    """Offload, onload, sleep and wake in one step."""

    @property
    def seconds(self) -> float:
        """The publish without switches."""
        return self.quantise_s + self.travel_s + self.load_s + self.overhead_s


def publish_estimate(run: PlannedRun, given: Assumptions) -> PublishEstimate:
    """The publish and the switches of one step."""
    config = run.config
    shard = run.publish_bytes / config.engine.tensor_parallel
    state = rank_state(run.spec, config.trainer, pipeline_rank=0)
    replicas = config.trainer.parallel.data if run.placement.transport != "shm" else 1
    return PublishEstimate(
        quantise_s=2 * state.parameters / replicas / given.memory_bytes_s,
        travel_s=_travel_s(run, given, shard),
        load_s=2 * shard / given.memory_bytes_s,
        overhead_s=given.publish_overhead_s,
        switch_s=_switch_s(run, given, shard),
    )


def _travel_s(run: PlannedRun, given: Assumptions, shard: float) -> float:
    """Seconds until the last engine rank has its shard."""
    config, placement = run.config, run.placement
    world = config.trainer.parallel.world_size
    if placement.transport == "cuda_ipc":
        inside = shard * (world - 1) / world / given.nvlink_bytes_s
        nodes = -(-world // given.gpus_per_node)
        entering = run.publish_bytes * (nodes - 1) / nodes / given.gpus_per_node / given.nic_bytes_s
        return inside + entering
    link = given.nic_bytes_s if placement.spans_nodes else given.nvlink_bytes_s
    if placement.transport == "nccl":
        return (shard + (config.engine.num_engines - 1) * min(largest_bucket_bytes(run), shard)) / link
    ranks_a_node = min(config.engine.num_engines * config.engine.tensor_parallel, given.gpus_per_node)
    through_host = 2 * shard * ranks_a_node / given.pcie_bytes_s
    return through_host + (run.publish_bytes / given.nic_bytes_s if placement.spans_nodes else 0.0)


def _switch_s(run: PlannedRun, given: Assumptions, shard: float) -> float:
    if not run.in_turns:
        return 0.0
    trainer = run.config.trainer
    state = rank_state(run.spec, trainer, pipeline_rank=0)
    optimizer = 0 if trainer.optimizer.states_on_host else state.optimizer_bytes
    moved = {"none": 0, "optimizer": optimizer, "all": optimizer + state.parameters}
    sleeping = 2 * shard if run.config.engine.sleep_level == 1 else 0.0
    return (2 * moved[trainer.offload] + sleeping) / given.pcie_bytes_s
