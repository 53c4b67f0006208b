"""CPU seconds of the controller in a step, by part, its memory and stored bytes, at 8, 64 and 512 engines and ranks.

`python -m benchmarks.control_plane --json OUT [--quick]` runs the product's controller, pool, planner, batching,
publisher, recorder and history client over stand-ins that answer at once with answers of the real sizes (no tensors).
A step has 8,192 responses of 14,000 tokens on average, and the model is Qwen3-32B.
"""

import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import psutil
import ray

from benchmarks.control_plane.fleet import Fleet, Load
from benchmarks.control_plane.meter import ALL, Meter
from benchmarks.control_plane.object_store import created_bytes
from benchmarks.control_plane.standins import Sizes
from benchmarks.harness.record import Goal, Row, arguments, write
from launcher.cluster.ray_cluster import start_ray
from launcher.config.schema import ClusterConfig
from launcher.run_dir.directory import RunDirectory
from megatron_rl.batching.batch import build_batch
from megatron_rl.controller import controller
from megatron_rl.model.spec import ModelSpec, read_model_spec
from megatron_rl.weights.reshard_plan import wire_tensors
from rollout.weights.format import WeightFormat

MODEL = Path("examples/recipes/models/Qwen3-32B")
STEP_S = 300.0
"""Length of a step against which the share of the controller is told."""
NUM_STEPS = 3
"""The first one warms up and is not counted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every scale and write the record."""
    parser = arguments("CPU time of the controller over many engines and trainer ranks.")
    parser.add_argument("--scales", type=int, nargs="+", default=[8, 64, 512])
    options = parser.parse_args(argv)
    scales = [8, 16] if options.quick else options.scales
    spec = read_model_spec(MODEL)
    start_ray(ClusterConfig(object_store_bytes=2 << 30), num_actors=4)
    try:
        rows = [row for scale in scales for row in _measure(scale, spec, num_prompts=64 if options.quick else 512)]
    finally:
        ray.shutdown()
    write(
        options.json, rows=rows, goals=_goals(rows, scales), not_measured=["more than one node", "tokens and tensors"]
    )
    return 0


def _measure(scale: int, spec: ModelSpec, *, num_prompts: int) -> list[Row]:
    meter = Meter(created_bytes)
    sizes = Sizes(
        matrices=[tensor.name for tensor in wire_tensors(spec, WeightFormat(name="bf16"))],
        layers=spec.num_layers,
        mean_response_tokens=14_000,
        num_forwards=14_000,
    )
    load = Load(num_engines=scale, num_ranks=max(scale, 8), num_prompts=num_prompts, group_size=16, num_steps=NUM_STEPS)
    with tempfile.TemporaryDirectory() as folder, RunDirectory(folder) as directory:
        fleet = Fleet(load, sizes, spec, meter, directory)
        with patch.object(controller, "build_batch", meter.measured("batch", build_batch)):
            fleet.controller().run()
        fleet.end()
    memory = psutil.Process(os.getpid()).memory_info().rss
    counted, stored = meter.steps[1:], meter.stored_bytes[1:]
    rows: list[Row] = [
        {
            "scale": scale,
            "part": part,
            "cpu_s": round(sum(step.get(part, 0.0) for step in counted) / len(counted), 4),
            "memory_bytes": memory,
            "stored_bytes": sum(stored) // len(stored),
        }
        for part in sorted({part for step in counted for part in step})
    ]
    shown = ", ".join(f"{row['part']} {row['cpu_s']}" for row in rows)
    sizes_shown = f"{memory >> 20} MiB, {rows[0]['stored_bytes']} bytes stored a step"
    print(f"{scale} engines and ranks, CPU seconds a step: {shown}; {sizes_shown}", flush=True)
    return rows


def _goals(rows: Sequence[Row], scales: Sequence[int]) -> list[Goal]:
    """The controller's share of a step at the largest scale, and the growth of its seconds from the second largest."""
    seconds = {row["scale"]: float(row["cpu_s"]) for row in rows if row["part"] == ALL}
    largest = max(scales)
    share = Goal(
        name=f"controller at {largest} engines and ranks, share of a step of {STEP_S:.0f} s",
        value=seconds[largest] / STEP_S,
        bound=0.05,
        direction="at most",
        unit="",
    )
    smaller = [scale for scale in scales if scale < largest]
    if not smaller:
        return [share]
    before = max(smaller)
    growth = Goal(
        name=f"growth of its seconds from {before} to {largest}, exponent",
        value=math.log(seconds[largest] / seconds[before]) / math.log(largest / before),
        bound=1.2,
        direction="at most",
        unit="",
    )
    return [share, growth]


if __name__ == "__main__":
    sys.exit(main())
