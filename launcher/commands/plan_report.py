"""The plan of a run as text of at most 100 columns, and as figures for machines. Pure.

Figures have whole bytes, and seconds of four significant digits, so that a committed plan is stable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.checks.fit import Fit
from launcher.cluster.node import NodeResources
from launcher.estimate.hardware import Gpu
from launcher.estimate.roofline import Assumptions
from launcher.estimate.step_time import StepEstimate
from launcher.estimate.tables import MemoryTable, gib

Figure = str | int | float | bool | Sequence["Figure"] | Mapping[str, "Figure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `plan` has computed beside the time."""

    gpu: Gpu
    nodes: tuple[NodeResources, ...]
    fitted: Fit | None
    """None for a run that cannot be placed."""
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def memory_lines(report: Report) -> list[str]:
    """Hardware, transport and the memory tables."""
    node = report.nodes[0]
    lines = [
        f"# {len(report.nodes)} node(s) of {len(node.gpu_bytes)} x {report.gpu.name} ({gib(node.gpu_bytes[0])}), "
        f"{gib(node.available_bytes)} of host memory",
        f"# figures of the GPU: {report.gpu.source}",
    ]
    if report.fitted is None:
        return lines
    return [
        *lines,
        f"weights travel by {report.fitted.placement.transport}",
        *report.fitted.placement.notes,
        "",
        "# memory in GiB: parameters, gradients, optimizer, weights and KV cache exact, the rest estimated",
        *report.fitted.memory.lines(),
    ]


def time_lines(estimate: StepEstimate, given: Assumptions) -> list[str]:
    """Seconds by phase, the cost of the run, and all inputs."""
    rollout, train, publish = estimate.rollout, estimate.train, estimate.publish
    rows = {
        "rollout": (estimate.rollout_s, f"{rollout.seats} seats an engine, bound by {rollout.seats_by}"),
        "  if saturated": (
            rollout.saturated_s,
            f"full forward {1000 * rollout.forward_s:.1f} ms, {rollout.forward_by}",
        ),
        "train": (train.seconds, f"{train.tokens / 1e6:.2f} million tokens, {train.num_updates} optimizer step(s)"),
        "  products": (train.products_s, "forward, backward, recomputation"),
        "  exchanges": (train.communication_s, "tensor and expert ranks"),
        "  pipeline": (train.pipeline_s, "waiting for other stages"),
        "  optimizer": (train.optimizer_s, "gradients, update, parameters"),
        "publish": (publish.seconds, f"travel {publish.travel_s:.2f} s, load {publish.load_s:.2f} s"),
        "switches": (publish.switch_s, "offload, onload, sleep, wake"),
        "step": (estimate.step_s, f"{estimate.num_steps} steps: {estimate.gpu_hours:,.0f} GPU-hours"),
    }
    return [
        "",
        "# time: an ESTIMATE from a roofline; nothing was measured",
        *[f"{name:16}{seconds:10.2f} s  {text}" for name, (seconds, text) in rows.items()],
        "# inputs of the estimate",
        *[f"{name}: {value}" for name, value in inputs(given).items()],
    ]


def inputs(given: Assumptions) -> dict[str, Figure]:
    """Everything that the estimate of time assumes, beside the configuration."""
    lengths = given.lengths
    return {
        "lengths": lengths.source,
        "prompt_tokens": _rounded(lengths.prompt),
        "response_tokens": _rounded(lengths.response),
        "longest_response_tokens": _rounded(lengths.longest),
        "tokens_per_forward": _rounded(lengths.tokens_per_forward),
        "verified_tokens": _rounded(given.verified_tokens),
        "product_share": given.product_share,
        "bandwidth_share": given.bandwidth_share,
        "forward_overhead_s": given.forward_overhead_s,
        "all_reduce_latency_s": given.all_reduce_latency_s,
        "publish_overhead_s": given.publish_overhead_s,
    }


def plan_figures(report: Report, estimate: StepEstimate | None, given: Assumptions) -> dict[str, Figure]:
    """The plan for machines: bytes by table, phase and item; seconds by phase; GPU-hours."""
    node, fitted = report.nodes[0], report.fitted
    return {
        "hardware": {
            "nodes": len(report.nodes),
            "gpus_per_node": len(node.gpu_bytes),
            "gpu": report.gpu.name,
            "host_bytes": node.available_bytes,
            "shm_bytes": node.shared_bytes,
        },
        "fits": not report.problems,
        "problems": report.problems,
        "warnings": report.warnings,
        "transport": fitted.placement.transport if fitted else "",
        "memory": [_table(table) for table in fitted.memory.tables] if fitted else [],
        "changes": _changes(fitted),
        "time": _times(estimate) if estimate else {},
        "inputs": inputs(given),
    }


def _table(table: MemoryTable) -> dict[str, Figure]:
    return {
        "title": table.title,
        "count": table.count,
        "available_bytes": table.available_bytes,
        "needed_bytes": table.needed_bytes,
        "worst_phase": table.worst_phase,
        "phases": {phase: {item.what: item.num_bytes for item in items} for phase, items in table.phases.items()},
    }


def _changes(fitted: Fit | None) -> list[Figure]:
    """All changes that free memory of a table that does not fit."""
    return [
        {
            "title": shortage.table.title,
            "key": change.key,
            "value": change.value,
            "freed_bytes": change.freed_bytes,
            "suffices": change.suffices,
        }
        for shortage in (fitted.memory.shortages if fitted else ())
        for change in shortage.changes
    ]


def _times(estimate: StepEstimate) -> dict[str, Figure]:
    rollout, train, publish = estimate.rollout, estimate.train, estimate.publish
    seconds = {
        "rollout_s": estimate.rollout_s,
        "rollout_saturated_s": rollout.saturated_s,
        "forward_s": rollout.forward_s,
        "train_s": train.seconds,
        "train_products_s": train.products_s,
        "train_exchanges_s": train.communication_s,
        "train_pipeline_s": train.pipeline_s,
        "train_optimizer_s": train.optimizer_s,
        "publish_s": publish.seconds,
        "switches_s": publish.switch_s,
        "step_s": estimate.step_s,
        "gpu_hours": estimate.gpu_hours,
    }
    return {
        "seats": rollout.seats,
        "seats_by": rollout.seats_by,
        "forward_by": rollout.forward_by,
        **{name: _rounded(value) for name, value in seconds.items()},
    }


def _rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")
