"""A run on H100s for tests of estimates; the model has round sizes, so that closed forms are short."""

from dataclasses import replace

from launcher.checks.memory import MemoryPlan
from launcher.cluster.node import NodeResources
from launcher.cluster.placement import plan
from launcher.config.schema import RunConfig
from launcher.estimate.hardware import GPUS
from launcher.estimate.lengths import stated_lengths
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.roofline import Assumptions
from launcher.estimate.tables import MemoryTable
from tests.support.model_specs import qwen_spec

SPEC = replace(
    qwen_spec(),
    num_layers=10,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    ffn_size=4096,
    vocab_size=32000,
    max_positions=1 << 20,
)
LINEAR = 10 * (1024 * (2 * 1024 + 2 * 512) + 3 * 1024 * 4096)
"""Weights of all decoder layers."""
OUTPUT = 32000 * 1024
KV_BYTES = 2 * 2 * 10 * 512
"""Keys and values of a token on one rank."""


def planned(*, gpus: int = 1, nodes: int = 1, spec=SPEC, **parts: object) -> PlannedRun:
    """A run on `nodes` nodes of `gpus` H100s; `parts` are parts of its configuration."""
    base = {"model": "m", "run_dir": "r", "num_steps": 10, "data": {"train": [{"path": "x"}]}}
    config = RunConfig.model_validate({**base, **parts})
    return PlannedRun(config=config, spec=spec, placement=plan(config, nodes_of(gpus, nodes)))


def nodes_of(gpus: int, nodes: int) -> list[NodeResources]:
    """Nodes of so many H100s."""
    host = {"cpu_cores": 64, "available_bytes": 1 << 41, "shared_bytes": 1 << 40}
    return [NodeResources(**host, gpu_bytes=(80 << 30,) * gpus, name=f"n{number}") for number in range(nodes)]


def given(**changes: object) -> Assumptions:
    """Peaks that are reached, and no fixed costs."""
    base = Assumptions(
        gpu=GPUS["h100"],
        gpus_per_node=8,
        lengths=stated_lengths(prompt=100, response=200, longest=800, tokens_per_forward=1),
        product_share=1.0,
        bandwidth_share=1.0,
        forward_overhead_s=0.0,
        all_reduce_latency_s=0.0,
        publish_overhead_s=0.0,
        verified_tokens=1.0,
    )
    return replace(base, **changes)


def tightest(memory: MemoryPlan) -> MemoryTable:
    """The table that is fullest for its size."""
    return max(memory.tables, key=lambda table: table.needed_bytes / table.available_bytes)
