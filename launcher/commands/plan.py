"""`megatron-rl plan`: memory of a run by device, node and phase, and an estimate of its time, before it is queued.

Reads the configuration and the model's `config.json`. Needs no weights, no data, no GPU and no Ray. Every figure is
arithmetic or a labelled estimate with its inputs.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.checks.algorithm import algorithm_warnings
from launcher.checks.combinations import checkpoint_warnings, run_combinations
from launcher.checks.deadlines import warnings_of_estimate
from launcher.checks.fit import Fit, fit
from launcher.checks.formats import weight_format_warnings
from launcher.checks.fp8 import fp8_warnings
from launcher.checks.memory import store_warnings
from launcher.cluster.node import NodeResources
from launcher.commands.plan_report import Report, memory_lines, plan_figures, time_lines
from launcher.config.loading import listing
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from launcher.estimate.hardware import GPUS
from launcher.estimate.lengths import MEAN_SHARE, Lengths, recorded_lengths, stated_lengths
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.roofline import Assumptions
from launcher.estimate.step_time import StepEstimate, step_estimate
from launcher.estimate.trainer_kernels import attention_warnings
from launcher.run_dir.atomic_files import replace_text
from megatron_rl.model.spec import ModelSpec, read_model_spec
from rollout.weights.format import WeightFormat

_GIB = 1 << 30
CPU_CORES = 96
"""Cores of a planned node; they decide nothing on a node with GPUs."""
FORWARD_OVERHEAD_S, ALL_REDUCE_LATENCY_S, PUBLISH_OVERHEAD_S = 2e-3, 10e-6, 2.0
"""See `Assumptions`; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the configuration does not say; 0 and empty stand for the default."""

    nodes: int
    gpus_per_node: int
    gpu: str
    """Kind of GPU; see `gpu_kind`."""
    host_gib: float
    """Host memory of a node."""
    shm_gib: float
    """`/dev/shm` of a node."""
    json: str
    """File for the figures; empty for none."""
    lengths: str
    """Run directory, metrics or traces of an earlier run."""
    prompt_tokens: float
    response_tokens: float
    tokens_per_forward: float
    verified_tokens: float
    product_share: float
    bandwidth_share: float


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plan`."""
    add = parser.add_argument
    add("--nodes", type=int, default=0, help="nodes (default: cluster.slurm.nodes)")
    add("--gpus-per-node", type=int, default=0, help="GPUs of a node (default: cluster.slurm.gpus_per_node, or 8)")
    add("--gpu", choices=sorted(GPUS), default="", help="kind of GPU (default: cluster.slurm.gpu, or h100)")
    add("--host-gib", type=float, default=0, help="host memory of a node (default: that of the DGX system)")
    add("--shm-gib", type=float, default=0, help="/dev/shm of a node (default: half of the host memory)")
    add("--json", default="", metavar="OUT", help="also write the figures to this file")
    add("--lengths", default="", metavar="PATH", help="lengths of an earlier run: its directory, metrics or traces")
    add("--prompt-tokens", type=float, default=0, help="mean prompt (default: half of its bound)")
    add("--response-tokens", type=float, default=0, help="mean response (default: a quarter of its bound)")
    add("--tokens-per-forward", type=float, default=0, help="tokens that a forward emits for a request (default: 1)")
    add("--verified-tokens", type=float, default=0, help="tokens that it computes (default: twice the drafts + 1)")
    add("--product-share", type=float, default=0.4, help="share of the peak that products reach (default: 0.4)")
    add("--bandwidth-share", type=float, default=0.7, help="share of bandwidths that is reached (default: 0.7)")


def plan_options(arguments: argparse.Namespace) -> PlanOptions:
    """The parsed options.

    Raises:
        ConfigError: a value is out of its bounds.
    """
    options = PlanOptions(**{name: getattr(arguments, name) for name in PlanOptions.__dataclass_fields__})
    for name in ("nodes", "gpus_per_node", "host_gib", "shm_gib", "prompt_tokens", "response_tokens"):
        if (value := getattr(options, name)) < 0:
            raise ConfigError(f"{_option(name)} = {value} is negative; leave it out for the default")
    for name in ("product_share", "bandwidth_share"):
        if not 0 < (value := getattr(options, name)) <= 1:
            raise ConfigError(f"{_option(name)} = {value} is no share above 0 and at most 1; 0.4 and 0.7 are common")
    return options


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def gpu_kind(config: RunConfig, options: PlanOptions) -> str:
    """Name of the planned GPU: `--gpu`, else `cluster.slurm.gpu`, else h100."""
    return options.gpu or config.cluster.slurm.gpu or "h100"


def planned_nodes(config: RunConfig, options: PlanOptions) -> tuple[NodeResources, ...]:
    """The nodes that the options describe."""
    gpu, slurm = GPUS[gpu_kind(config, options)], config.cluster.slurm
    host_bytes = int(options.host_gib * _GIB) or gpu.host_bytes
    return tuple(
        NodeResources(
            cpu_cores=CPU_CORES,
            available_bytes=host_bytes,
            gpu_bytes=(gpu.memory_bytes,) * (options.gpus_per_node or slurm.gpus_per_node or 8),
            gpu_capability=gpu.capability,
            name=f"node {number + 1}",
            shared_bytes=int(options.shm_gib * _GIB) or host_bytes // 2,
        )
        for number in range(options.nodes or slurm.nodes)
    )


def planned(config: RunConfig, options: PlanOptions) -> tuple[Report, StepEstimate | None, Assumptions]:
    """Places, memory and time of a run; the report has its problems, and a run that cannot be placed has no estimate.

    Raises:
        ConfigError: the model's `config.json` cannot be read, or an option is out of its bounds.
    """
    try:
        spec = read_model_spec(Path(config.model))
    except ValueError as error:
        raise ConfigError(f"`model` = {config.model}: {error}") from None
    nodes = planned_nodes(config, options)
    problems = run_combinations(config)
    fitted = fit(config, spec, nodes, problems)
    format = WeightFormat.of(config.engine)
    given = assumptions(config, options, len(nodes[0].gpu_bytes))
    estimate = _estimate(spec, fitted, given, sum(len(node.gpu_bytes) for node in nodes))
    report = Report(
        gpu=GPUS[gpu_kind(config, options)],
        nodes=nodes,
        fitted=fitted,
        problems=tuple(problems),
        warnings=(
            *weight_format_warnings(spec, format, nodes[0]),
            *fp8_warnings(spec, config.trainer, format),
            *attention_warnings(config.trainer, nodes[0]),
            *algorithm_warnings(config.algorithm),
            *checkpoint_warnings(config),
            *(warnings_of_estimate(config, estimate.train.seconds) if estimate else ()),
            *(store_warnings(fitted.config, fitted.placement) if fitted else ()),
            *_uncounted(config),
        ),
    )
    return report, estimate, given


def plan(config: RunConfig, options: PlanOptions) -> int:
    """Prints the plan; returns the exit code.

    Raises:
        ConfigError: the run is impossible or does not fit. The tables have been printed then, and the file written.
    """
    report, estimate, given = planned(config, options)
    print("\n".join([*memory_lines(report), *(time_lines(estimate, given) if estimate else [])]))
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if options.json:
        replace_text(Path(options.json), json.dumps(plan_figures(report, estimate, given), indent=1) + "\n")
    if report.problems:
        raise ConfigError(listing("plan", report.problems))
    return 0


def _estimate(spec: ModelSpec, fitted: Fit | None, given: Assumptions, num_gpus: int) -> StepEstimate | None:
    """None for a run that cannot be placed."""
    if fitted is None:
        return None
    run = PlannedRun(config=fitted.config, spec=spec, placement=fitted.placement, further=fitted.further)
    return step_estimate(run, given, num_gpus=num_gpus)


def _uncounted(config: RunConfig) -> list[str]:
    """Warns of what the estimate of time leaves out: how many groups have no signal is unknown."""
    groups, most = config.algorithm.prompts_per_step, config.algorithm.max_groups
    if most == groups:
        return []
    return [
        f"`algorithm.max_refill` = {config.algorithm.max_refill:g}: the estimate counts the rollout of {groups} "
        f"groups, and a step may sample {most}; the rollout then takes about {most / groups:.1f} times as long"
    ]


def assumptions(config: RunConfig, options: PlanOptions, gpus_per_node: int) -> Assumptions:
    """Inputs of the estimate of time."""
    lengths = _lengths(config, options)
    verified = options.verified_tokens or 2 * (lengths.tokens_per_forward - 1) + 1
    if verified < lengths.tokens_per_forward:
        raise ConfigError(
            f"--verified-tokens = {verified:g} is below the {lengths.tokens_per_forward:g} tokens that a forward "
            "emits; raise it"
        )
    return Assumptions(
        gpu=GPUS[gpu_kind(config, options)],
        gpus_per_node=gpus_per_node,
        lengths=lengths,
        product_share=options.product_share,
        bandwidth_share=options.bandwidth_share,
        forward_overhead_s=FORWARD_OVERHEAD_S,
        all_reduce_latency_s=ALL_REDUCE_LATENCY_S,
        publish_overhead_s=PUBLISH_OVERHEAD_S,
        verified_tokens=verified,
    )


def _lengths(config: RunConfig, options: PlanOptions) -> Lengths:
    if options.lengths:
        if options.prompt_tokens or options.response_tokens:
            raise ConfigError(
                f"--lengths = {options.lengths} says how long prompts and responses are; leave out --prompt-tokens and "
                "--response-tokens, or --lengths"
            )
        recorded = recorded_lengths(Path(options.lengths))
        return replace(recorded, tokens_per_forward=options.tokens_per_forward or recorded.tokens_per_forward)
    longest = config.sampling.max_response_tokens
    is_stated = options.prompt_tokens and options.response_tokens
    return stated_lengths(
        prompt=options.prompt_tokens or MEAN_SHARE["prompt_tokens"] * config.data.max_prompt_tokens,
        response=options.response_tokens or MEAN_SHARE["response_tokens"] * longest,
        longest=longest,
        tokens_per_forward=options.tokens_per_forward or 1.0,
        source="stated" if is_stated else "assumed; state them, or name a run by --lengths",
    )
