"""What the figures of `benchmarks.publish` are compared with: bytes of a shard, bounds of memory, and goals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.record import Goal, Row
from benchmarks.publish.cases import TITLES, TRAINERS, Case
from megatron_rl.model.spec import read_model_spec
from megatron_rl.ranks import trainer_ranks
from megatron_rl.weights.reshard_plan import ReshardPlan
from megatron_rl.weights.shards import rank_shards
from rollout.weights.manifest import DTYPE_BYTES, Required


def byte_figures(
    plan: ReshardPlan, required: Sequence[Required], publishes: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Bytes that an engine rank received, counted in its transport, over those of its tensors, and over BF16.

    `bytes_over_bf16` are the planned bytes of quantised tensors with scales over those of the same tensors in BF16.
    """
    width = {tensor.name: DTYPE_BYTES[tensor.dtype] for tensor in plan.tensors}
    layout = plan.format.layout
    suffix = layout.scale_suffix if layout is not None else None
    shards, in_bf16 = [], []
    for boxes in required:
        sizes = {name: sum(box.size for box in parts) for name, parts in boxes.items()}
        shards.append(sum(size * width[name] for name, size in sizes.items()))
        in_bf16.append(sum(2 * size for name, size in sizes.items() if suffix is None or not name.endswith(suffix)))
    codes = [tensor for tensor in plan.tensors if layout is not None and tensor.dtype == layout.dtype]
    names = {tensor.name for tensor in codes} | {f"{tensor.name}{suffix}" for tensor in codes}
    in_8_bits = sum(tensor.num_bytes for tensor in plan.tensors if tensor.name in names)
    received = statistics.median(publish["publish/received_bytes_max"] for publish in publishes)
    return {
        "rank_bytes": received,
        "own_shard_bytes": max(shards),
        "rank_bytes_over_own_shard": received / max(shards),
        "received_over_bf16": received / max(in_bf16),
        "bytes_over_bf16": in_8_bits / sum(2 * tensor.num_bytes for tensor in codes) if codes else 1.0,
    }


def peak_bounds(
    case: Case, model: Path, plan: ReshardPlan, required: Sequence[Required], transport: str
) -> dict[str, float]:
    """Bound on the extra memory of a process during a publish, by role; a trainer's shard of a layer is BF16."""
    width = {tensor.name: DTYPE_BYTES[tensor.dtype] for tensor in plan.tensors}
    on_engines = [
        [(name, box.size * width[name]) for name, parts in shard.items() for box in parts] for shard in required
    ]
    parallel, spec = TRAINERS[case.trainer], read_model_spec(model)
    on_trainers = [
        [
            (shard.hf_name, 2 * math.prod(shard.shape))
            for shard in rank_shards(spec, parallel, tensor_rank=slot.tensor_rank, pipeline_rank=slot.pipeline_rank)
        ]
        for slot in trainer_ranks(parallel, cpu_threads=1)
    ]
    buckets = 2 * max(bucket.num_bytes for bucket in plan.buckets)
    staged = {"trainer": 0, "engine": 0}
    if transport == "shm":
        sent_bytes = [sum(b.num_bytes for b in plan.buckets if b.source_rank == rank) for rank in plan.source_ranks]
        staged = {"trainer": max(sent_bytes), "engine": sum(sent_bytes)}
    layers = {"trainer": _largest_layer(on_trainers), "engine": _largest_layer(on_engines)}
    return {f"peak_bound_bytes/{role}": buckets + layers[role] + staged[role] for role in layers}


def _largest_layer(ranks: Sequence[Sequence[tuple[str, int]]]) -> int:
    """Bytes of the largest layer on any rank, from names and bytes; embedding and output layer count as layers."""
    largest = 0
    for held in ranks:
        layers: dict[str, int] = {}
        for name, num_bytes in held:
            layer = name.partition(".layers.")[2].partition(".")[0] or name
            layers[layer] = layers.get(layer, 0) + num_bytes
        largest = max(largest, *layers.values())
    return largest


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Goals over all 8-bit rows; the worst row counts, and of an interval the upper end."""
    ours = [row for row in rows if row["kind"] == "publish" and row["format"] != "bf16"]
    deltas = [row for row in rows if row["kind"] == "delta" and row["format"] != "bf16"]
    if not ours:
        return []
    peers, overlapped = (
        [row for row in rows if row["kind"] == kind and row["format"] != "bf16"] for kind in ("peer", "overlapped peer")
    )
    rate = min(float(row["plain_s"]) / float(row["transfer_s"]) for row in ours)
    return [
        _worst(ours, "proof_share_high", "proof over a publish without it", 0.15),
        _worst(ours, "rank_bytes_over_own_shard", "bytes that a rank received over its own 8-bit shard", 1.02),
        _worst(peers, "ours_over_peer_high", "seconds without the proof over the peer's", 0.6),
        _worst(peers, "proven_over_peer_high", "seconds with the proof over the peer's", 0.7),
        _worst(overlapped, "proven_over_peer_high", "seconds with the proof over the overlapped peer's", 1.0),
        Goal(name="rate over a plain copy's", value=rate, bound=0.7, direction="at least", unit="x"),
        *(_worst_peak(ours, role) for role in TITLES),
        *([_worst(deltas, "bytes_over_whole", "bytes of a delta over those of all", 0.25)] if deltas else []),
    ]


def _worst(rows: Sequence[Row], column: str, name: str, bound: float) -> Goal:
    value = max(float(row[column]) for row in rows)
    return Goal(name=name, value=value, bound=bound, direction="at most", unit="x")


def _worst_peak(rows: Sequence[Row], role: str) -> Goal:
    value = max(float(row[f"peak_extra_bytes/{role}"]) / float(row[f"peak_bound_bytes/{role}"]) for row in rows)
    return Goal(name=f"{role}: peak extra over its bound", value=value, bound=1.0, direction="at most", unit="x")
