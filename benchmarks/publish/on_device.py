"""A publish on one device: an engine loads BF16 weights of another process on the same device.

Packer, colocated transport and engine are the product's. Instead of a trainer, a process holds random parameters only,
so a model of 32 billion parameters fits beside its engine. With `device` cpu the same code uses shared memory; its
figures only show that it works.
"""

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch

from benchmarks.harness.record import Goal, Row
from benchmarks.rollout.step_time import CUDA_SHAPES, TINY
from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import read_model_spec
from megatron_rl.weights.fp8_passthrough import parameter_shapes
from megatron_rl.weights.packer import WeightPacker
from megatron_rl.weights.reshard_plan import ReshardPlan, plan_reshard
from megatron_rl.weights.shards import Shard, rank_shards
from rollout.config import EngineConfig, Format
from rollout.engine.spec import EngineSpec
from rollout.processes import ProcessEnv
from rollout.transports.base import ColocatedChannel, Memory
from rollout.types import WeightVersion
from rollout.weights.fingerprint_sums import Fingerprint, difference
from rollout.weights.format import WeightFormat
from rollout.weights.manifest import Required

RUN_ID = "ondevice"
BUCKET_BYTES = 256 << 20
NUM_PUBLISHES = 6
"""Number of publishes; the first allocates memory and is not counted."""
TIMEOUT_S = 600.0

Device = Literal["cpu", "cuda"]


SHAPES = {**CUDA_SHAPES, "tiny": TINY}
GOALS_S = {"7B": 1.0, "32B": 5.0}
"""Largest allowed seconds of a publish on an H200."""


BESIDE_WEIGHTS = 6 << 30
"""Bytes of a device for keys and values, activations, CUDA graphs, buckets, and two contexts."""


def too_large(name: str, format: Format, device_bytes: int) -> bool:
    """Whether BF16 weights of the shape and an engine with the same weights in `format` exceed the device."""
    shape = SHAPES[name]
    return shape.weight_bytes("bf16") + shape.weight_bytes(format) + BESIDE_WEIGHTS > device_bytes


def measure(names: Sequence[str], formats: Sequence[Format], device: Device, work: Path) -> Iterator[Row]:
    """A row for each shape and format that fits: medians over publishes."""
    device_bytes = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else sys.maxsize
    for name in names:
        model = work / name
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(SHAPES[name].config()), encoding="utf-8")
        for format in formats:
            if too_large(name, format, device_bytes):
                continue
            publishes = asyncio.run(_publishes(model, format, device))
            yield {
                "kind": "on one device",
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "model": name,
                "format": format,
                **{key: statistics.median(publish[key] for publish in publishes[1:]) for key in publishes[0]},
            }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Goals for the seconds of the slowest 8-bit format, by shape."""
    reached = []
    for name, bound in GOALS_S.items():
        seconds = [float(row["total_s"]) for row in rows if row["model"] == name and row["format"] != "bf16"]
        if seconds:
            goal = f"colocated publish of the shape of {name}"
            reached.append(Goal(name=goal, value=max(seconds), bound=bound, direction="at most", unit="s"))
    return reached


async def _publishes(model: Path, format: Format, device: Device) -> list[dict[str, float]]:
    os.environ.update(ProcessEnv(single_node=True).engine(threads=os.cpu_count() or 1 if device == "cuda" else 1))
    from rollout.engine.engine import Engine

    config = EngineConfig(
        format=format,
        bf16_first_layers=0,
        bf16_last_layers=0,
        max_num_seqs=8,
        kv_cache_bytes=64 << 20 if device == "cpu" else 1 << 30,
        update_timeout_s=TIMEOUT_S,
    )
    engine = Engine(EngineSpec(engine_id=0, run_id=RUN_ID, config=config, directory=str(model), max_model_len=256))
    await engine.start()
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    holder = context.Process(target=_hold, args=(end, str(model), format, device, engine.weights.required))
    holder.start()
    try:
        memory: Memory = "cuda" if device == "cuda" else "shm"
        await engine.weights.init_transport(ColocatedChannel(memory=memory, shared_with=((0,),)))
        plan = _plan(model, format, engine.weights.required)
        return [await _publish(engine, plan, pipe, WeightVersion(number)) for number in range(NUM_PUBLISHES)]
    finally:
        pipe.send(None)
        holder.join(TIMEOUT_S)
        engine.shutdown()


async def _publish(engine: object, plan: ReshardPlan, pipe: Connection, version: WeightVersion) -> dict[str, float]:
    from rollout.engine.engine import Engine

    assert isinstance(engine, Engine)
    began = time.perf_counter()
    pipe.send(version)
    address, scales_s, pack_s, send_s = await asyncio.to_thread(pipe.recv)
    staged = time.perf_counter()
    times = await engine.weights.update(plan.manifest(RUN_ID, version), {0: address})
    applied = time.perf_counter()
    pipe.send("sums")
    expected: Fingerprint = await asyncio.to_thread(pipe.recv)
    gap, where = difference(engine.weights.sums, expected)
    assert gap < 0.02, f"{where} differs by {gap}"
    proven = time.perf_counter()
    await engine.weights.resume()
    pipe.send("abandon")
    peak_bytes = await asyncio.to_thread(pipe.recv)
    return {
        "total_s": applied - began,
        "scales_s": scales_s,
        "pack_s": pack_s,
        "send_s": send_s,
        "stage_s": staged - began,
        "verify_s": times.arrive_s,
        "pause_s": times.pause_s,
        "apply_s": times.apply_s,
        "sums_s": proven - applied,
        "weight_gap": gap,
        "wire_bytes": float(sum(bucket.num_bytes for bucket in plan.buckets)),
        "peak_extra_bytes": float(peak_bytes),
    }


def _plan(model: Path, format: Format, required: Sequence[Required]) -> ReshardPlan:
    return plan_reshard(
        read_model_spec(model),
        ParallelConfig(),
        format=WeightFormat(name=format),
        bucket_bytes=BUCKET_BYTES,
        uses_te_layer_names=False,
        required=required,
    )


# -- the process that holds the weights ----------------------------------------------------------------


def _hold(pipe: Connection, model: str, format: Format, device: Device, required: Sequence[Required]) -> None:
    from rollout.transports.colocated import ColocatedSender, SharedRegion, ShmRegion

    region: SharedRegion = ShmRegion(run_id=RUN_ID, rank=0)
    if device == "cuda":
        from rollout.transports.cuda_ipc import CudaRegion

        region = CudaRegion()
    spec, plan = read_model_spec(Path(model)), _plan(Path(model), format, required)
    held = rank_shards(spec, ParallelConfig(), tensor_rank=0, pipeline_rank=0, uses_te_layer_names=False)
    packer = WeightPacker(
        plan, rank=0, held=held, parameters=_parameters(held, device), tensor_group=None, fingerprints=lambda _: True
    )
    sender = ColocatedSender(
        region, None, run_id=RUN_ID, rank=0, hosted=[[0]], buckets=plan.buckets, backend="gloo", timeout_s=TIMEOUT_S
    )
    while (order := pipe.recv()) is not None:
        if order == "sums":
            pipe.send(packer.published_fingerprint())
        elif order == "abandon":
            sender.abandon()
            pipe.send(_peak_extra(device))
        else:
            _reset_peak(device)
            began = time.perf_counter()
            packer.refresh_scales()
            _synchronize(device)
            scales_s = time.perf_counter() - began
            address = packer.send(sender, order)
            pipe.send((address, scales_s, packer.pack_s, packer.send_s))


def _parameters(held: Sequence[Shard], device: Device) -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02, requires_grad=False)
        for name, shape in parameter_shapes(held).items()
    }


def _synchronize(device: Device) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


_before = [0]


def _reset_peak(device: Device) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _before[0] = torch.cuda.memory_allocated()


def _peak_extra(device: Device) -> int:
    """Peak bytes on the device beyond those before the publish; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() - _before[0] if device == "cuda" else 0
