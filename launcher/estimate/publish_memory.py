"""Memory that a publish needs beside the weights of both sides, by transport. Pure.

Sources: `rollout.transports.colocated` (a region on the device with all buckets of the engine ranks there, and two
buffers for buckets of other devices), `rollout.transports.streaming` (two buffers on each end, baselines of deltas),
`rollout.transports.shm` (all buckets in shared memory, and one buffer), `megatron_rl.weights.packer` (boxes in FP32,
and the published values of one layer for the proof).

On one node shared memory holds all buckets once. Over several nodes each trainer rank has a region with the shards of
the engine ranks that it hands over (`ColocatedDelivery`), so engines on other devices of the node have their own copy.
"""

from collections.abc import Sequence

from launcher.estimate.loads import DeviceLoad, NodeLoad
from launcher.estimate.planned_run import PlannedRun
from megatron_rl.memory import MemoryItem, linear_parameters

BOX_ELEMENTS = 1 << 23
"""Weights that are quantised at a time on a device (`DEVICE_BOX_SIZE` of the packer), in three FP32 copies."""


def largest_bucket_bytes(run: PlannedRun) -> int:
    """Bound of a bucket: `publish.bucket_bytes`, or a matrix that is larger, which has a bucket of its own.

    A matrix is cut by the finer of the tensor-parallel sizes of both sides.
    """
    spec, config = run.spec, run.config
    finest = max(config.trainer.parallel.tensor, config.engine.tensor_parallel)
    width = 1 if config.engine.format != "bf16" and not _keeps_bf16_layers(run) else 2
    matrix = max(2 * spec.vocab_size, width * spec.ffn_size) * spec.hidden_size
    return max(config.publish.bucket_bytes, -(-matrix // finest))


def _keeps_bf16_layers(run: PlannedRun) -> bool:
    engine = run.config.engine
    return engine.bf16_first_layers + engine.bf16_last_layers > 0 or bool(engine.bf16_modules)


def device_publish_items(run: PlannedRun, load: DeviceLoad) -> Sequence[MemoryItem]:
    """Items on one device during a publish."""
    config, transport = run.config, run.placement.transport
    tensor = config.engine.tensor_parallel
    num_ends = load.num_trainers + load.num_engine_ranks
    shard = -(-run.publish_bytes // tensor)
    items = [_workspace(run, load)]
    if transport == "cuda_ipc" and load.num_engine_ranks:
        region = min(load.num_engine_ranks, tensor) * shard
        spare = 2 * largest_bucket_bytes(run) if config.trainer.parallel.world_size > 1 else 0
        items.append(MemoryItem(what="weights in transit", num_bytes=region + spare, knob="engine.tensor_parallel"))
    if transport == "nccl":
        buckets = 2 * num_ends * largest_bucket_bytes(run)
        items.append(MemoryItem(what="buckets in transit", num_bytes=buckets, knob="publish.bucket_bytes"))
    return items


def device_baselines(run: PlannedRun, load: DeviceLoad) -> Sequence[MemoryItem]:
    """Copies of the last publish on a device, for deltas over NCCL: a trainer rank's share, an engine rank's shard."""
    if not run.sends_deltas or run.placement.transport != "nccl":
        return []
    trainer = load.num_trainers * -(-run.publish_bytes // run.config.trainer.parallel.world_size)
    engines = load.num_engine_ranks * -(-run.publish_bytes // run.config.engine.tensor_parallel)
    return [MemoryItem(what="publish baselines", num_bytes=trainer + engines, knob="publish.delta")]


def _workspace(run: PlannedRun, load: DeviceLoad) -> MemoryItem:
    """Boxes that are quantised, and one layer: an expert as published for its sums, or as loaded by an engine rank."""
    spec, config = run.spec, run.config
    layer = 2 * linear_parameters(spec) // spec.num_layers
    proof = max(
        layer // (1 if spec.experts is None else config.trainer.parallel.expert), 2 * spec.vocab_size * spec.hidden_size
    )
    trainer = load.num_trainers * (3 * 4 * BOX_ELEMENTS + proof // config.trainer.parallel.tensor)
    engines = load.num_engine_ranks * layer // config.engine.tensor_parallel
    return MemoryItem(what="publish workspace", num_bytes=trainer + engines, knob="trainer.parallel.tensor")


def host_publish_items(run: PlannedRun, load: NodeLoad) -> Sequence[MemoryItem]:
    """Items in the memory of a node during a publish."""
    transport = run.placement.transport
    if transport == "shm":
        staged, knob = run.publish_bytes, "engine.format"
        if run.placement.spans_nodes:
            staged = load.num_staged_shards * -(-run.publish_bytes // run.config.engine.tensor_parallel)
            knob = "engine.tensor_parallel"
        return [MemoryItem(what="weights in transit", num_bytes=staged, knob=knob)]
    if transport == "gloo":
        ends = load.num_trainers + load.num_engine_ranks
        return [
            MemoryItem(
                what="buckets in transit",
                num_bytes=2 * ends * largest_bucket_bytes(run),
                knob="publish.bucket_bytes",
            )
        ]
    return []


def host_baselines(run: PlannedRun, load: NodeLoad) -> Sequence[MemoryItem]:
    """Copies of the last publish in the memory of a node, for deltas over gloo."""
    config = run.config
    if not run.sends_deltas or run.placement.transport != "gloo":
        return []
    trainer = run.publish_bytes * load.num_trainers // config.trainer.parallel.world_size
    engines = load.num_engines * run.publish_bytes
    return [MemoryItem(what="publish baselines", num_bytes=trainer + engines, knob="publish.delta")]
