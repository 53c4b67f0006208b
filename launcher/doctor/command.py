"""`megatron-rl doctor CONFIG`: checks before a long run, a line each, green or red with the fix.

On one machine it runs by itself. Over the nodes of an allocation it runs as a step with one task a node:
`srun --ntasks-per-node=1 megatron-rl doctor CONFIG`; then every node checks itself and its connections, and the first
one everything else. No Ray is started, except for `--log-probabilities`; the Ray cluster of `cluster.address` is asked
for its nodes.
"""

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from launcher.checks.check import CheckedRun, check_model, check_run
from launcher.checks.expected_nodes import expected_nodes, like_this_node
from launcher.checks.further_models import further_specs
from launcher.checks.health.health_check import HealthCheck, run_checks
from launcher.checks.health.network import network_line
from launcher.checks.health.node import node_checks
from launcher.checks.health.reward import reward_line
from launcher.checks.health.stop_tokens import stop_token_line
from launcher.checks.health.tokenizer import tokenizer_line
from launcher.checks.health.wandb import is_wandb_installed, wandb_line
from launcher.checks.health.write_speed import FILES_PER_RANK, write_speed, write_speed_line
from launcher.checks.paths import folder_problems
from launcher.checks.preflight import Check, kernels, run_disk
from launcher.cluster.addresses import interfaces, node_address, resolve
from launcher.cluster.health import node_facts, node_needs
from launcher.cluster.node import NodeResources, cpu_model, node_resources
from launcher.cluster.pairs import Endpoint
from launcher.cluster.ports import free_ports
from launcher.cluster.ray_cluster import joined_nodes
from launcher.cluster.slurm_step import SlurmStep, allocated_nodes, beside_allocation, in_allocation
from launcher.commands.slurm import recorded_times
from launcher.config.schema import RunConfig
from launcher.doctor.log_probabilities import compare_log_probabilities
from launcher.doctor.step_memory import FreeMemory, least, read_memory, with_memory, write_memory
from launcher.endings.kinds import Ending
from megatron_rl.memory import checkpoint_bytes
from rollout.data.rows import PromptRow, read_rows
from rollout.data.tokenizer import Tokenizer, TokenizerSource
from rollout.failures import DeadlineError
from rollout.stop_ids import end_of_sequence_ids

SAMPLE_ROWS = 8
"""Rows of each data file that are rendered and scored."""
GREEN, RED, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"


def doctor(config: RunConfig, nodes: Sequence[NodeResources] = ()) -> int:
    """Print a line for each check; returns 0, or the code of a refused configuration if a line is red.

    With `nodes`, trainer and engines are started there, and their log-probabilities compared, if no line is red.

    Raises:
        ConfigError: the configuration cannot be run, although its files can be read.
    """
    slurm = config.cluster.slurm
    is_beside = config.cluster.address == "local" and beside_allocation()
    if is_beside:
        print(f"this machine is no node of the job; to check the job's nodes: {_over(len(allocated_nodes()))}")
    num_red = 0
    for check in doctor_lines(config, () if config.cluster.address == "local" else nodes):
        num_red += bool(check.problem)
        print(_line(check), flush=True)
    if nodes and num_red:
        print("log-probabilities are compared once no line above is red")
    elif nodes:
        for check in _log_probabilities(config, nodes):
            num_red += bool(check.problem)
            print(_line(check), flush=True)
    if slurm.nodes > 1 and not is_beside and "SLURM_STEP_NODELIST" not in os.environ:
        print(f"over nodes: {_over(slurm.nodes)}")
    return Ending.USER_INPUT.code if num_red else 0


def _over(num_nodes: int) -> str:
    return f"srun --nodes={num_nodes} --ntasks-per-node=1 megatron-rl doctor CONFIG"


def doctor_lines(config: RunConfig, joined: Sequence[NodeResources] = ()) -> Iterator[Check]:
    """Lines of all checks in order, each as soon as its check has ended.

    Args:
        config: of the run.
        joined: nodes of the Ray cluster that `cluster.address` names; it is asked for them if there are none.

    Raises:
        ConfigError: the configuration cannot be run.
    """
    run_directory = Check(
        name="run directory", value=config.run_dir, problem="; ".join(folder_problems("run_dir", config.run_dir))
    )
    yield run_directory
    if run_directory.problem:
        return
    directory = _existing(Path(config.run_dir))
    needs = node_needs(config, {})
    if not (in_allocation() and needs.num_gpus):  # a login node has other GPUs; an unset key takes all of a node
        needs = replace(needs, num_gpus=None)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".doctor-") as folder:
        facts = node_facts(needs, Path(folder) / "canary")
    step = SlurmStep.of_this_process(facts.node)
    local, folder_of_step = node_resources(), directory / f".doctor-{step.name}"
    if len(step.nodes) > 1:
        write_memory(folder_of_step, facts.node, local)
    yield from run_checks([*node_checks(facts, needs), _network(config, folder_of_step, step, facts.node)])
    if not step.is_first or facts.unreadable:
        return
    if config.cluster.address != "local" and not joined:
        try:
            joined = joined_nodes(config.cluster)
        except (ValueError, DeadlineError) as error:
            yield Check(name="Ray cluster", value=config.cluster.address, problem=str(error))
            yield from _lines_without_nodes(config, directory)
            return
    memory_of_step = read_memory(folder_of_step, step.nodes)
    if memory_of_step:
        yield Check(name="least memory", value=str(least(memory_of_step)))
    nodes, memory = _nodes(config, joined, local, memory_of_step)
    checked = check_run(config, nodes)
    yield memory
    yield run_disk(directory, config, checked.spec, further_specs(config, checked.spec))
    yield from run_checks([*_run_checks(config, checked.spec.vocab_size), _write_speed(checked, directory)])
    has_gpus = len(local.gpu_bytes) >= max(len(node.gpu_bytes) for node in nodes)
    if config.engine.format == "int8" and has_gpus:  # a login node does not run the job's kernels
        yield kernels(local, *cpu_model())


def _lines_without_nodes(config: RunConfig, directory: Path) -> Iterator[Check]:
    """Lines that need no node of the run."""
    spec = check_model(config.model)
    try:
        yield run_disk(directory, config, spec, further_specs(config, spec))
    except ValueError as error:
        yield Check(name="disk", value=str(directory), problem=f"`trainer.critic.model`: {error}")
    yield from run_checks(_run_checks(config, spec.vocab_size))


def _nodes(
    config: RunConfig, joined: Sequence[NodeResources], local: NodeResources, step: Sequence[FreeMemory]
) -> tuple[Sequence[NodeResources], Check]:
    """Nodes on which the run is placed, and the line of their memory.

    `joined` are those of a Ray cluster, `local` is this node, `step` the memory of the nodes of the doctor's step.
    `check_run` refuses a run that these nodes cannot hold, so the line has no problem.
    """
    slurm = config.cluster.slurm
    if config.cluster.address != "local":
        nodes, value = joined, "fits every node of the Ray cluster"
    elif slurm.nodes == 1 and len(local.gpu_bytes) >= slurm.gpus_per_node and not beside_allocation():
        nodes, value = (local,), "fits this node"
    elif in_allocation() and step:
        nodes = with_memory(expected_nodes(slurm, local), step)
        value = f"fits {len(nodes)} node(s) with as much as the {len(step)} of this step"
    elif in_allocation():
        nodes = like_this_node(expected_nodes(slurm, local), local)
        value = f"fits {len(nodes)} node(s) with as much as this one"
    else:
        nodes, value = expected_nodes(slurm, local), "not checked: this is no node of the job, which checks its own"
    return nodes, Check(name="memory", value=value)


def _log_probabilities(config: RunConfig, nodes: Sequence[NodeResources]) -> Iterator[Check]:
    """Lines of the comparison; the logs of its processes are removed unless it fails."""
    checked = check_run(_without_history(config), nodes)
    log_dir = Path(tempfile.mkdtemp(dir=_existing(Path(config.run_dir)), prefix=".doctor-logs-"))
    yield from compare_log_probabilities(checked, log_dir)
    shutil.rmtree(log_dir)


def _without_history(config: RunConfig) -> RunConfig:
    history = config.history.model_copy(update={"drafts": False, "warm_start": ""})
    return config.model_copy(update={"history": history})


def _run_checks(config: RunConfig, vocab_size: int) -> list[HealthCheck]:
    @cache
    def tokenizer() -> Tokenizer:
        arguments = config.data.chat_template_arguments
        return Tokenizer(TokenizerSource(directory=config.model, template_arguments=arguments))

    def stop_tokens() -> tuple[str, list[str]]:
        ids = sorted({*end_of_sequence_ids(config.model), *config.sampling.stop_token_ids})
        return stop_token_line(tokenizer(), tokenizer().facts(), ids, vocab_size)

    measures: dict[str, Callable[[], tuple[str, list[str]]]] = {
        "tokenizer": lambda: tokenizer_line(tokenizer(), _sample(config)),
        "stop tokens": stop_tokens,
        "reward": lambda: reward_line(config.reward, _sample(config)),
        "wandb": lambda: wandb_line(
            config.wandb,
            environment=os.environ,
            home=Path.home(),
            is_installed=is_wandb_installed(),
        ),
    }
    return [HealthCheck(name=name, measure=measure) for name, measure in measures.items()]


def _write_speed(checked: CheckedRun, directory: Path) -> HealthCheck:
    config = checked.config
    by_node = Counter(rank.node for rank in checked.placement.trainers)
    most_ranks = max(by_node.values())
    return HealthCheck(
        name="write speed",
        measure=lambda: write_speed_line(
            write_speed(directory, FILES_PER_RANK * most_ranks),
            checkpoint_bytes(checked.spec, config.trainer, further_specs(config, checked.spec)),
            share=most_ranks / by_node.total(),
            interval_s=_interval_s(config),
            timeout_s=config.trainer.timeout_s,
            background=config.checkpoint.background,
        ),
    )


def _network(config: RunConfig, folder: Path, step: SlurmStep, node: str) -> HealthCheck:
    def measure() -> tuple[str, list[str]]:
        here = Endpoint(node=node, address=_address(config, node), port=free_ports(step.job_id).probe)
        try:
            return network_line(folder, here, step.nodes)
        finally:
            if len(step.nodes) == 1:  # other nodes may still read it
                shutil.rmtree(folder, ignore_errors=True)

    return HealthCheck(name="network", measure=measure)


def _address(config: RunConfig, node: str) -> str:
    """Address by which other nodes reach this one; the loopback address on a machine without a network."""
    present = interfaces()
    if {found[0] for found in present.values()} <= {"127.0.0.1"}:
        return "127.0.0.1"
    return node_address(node, config.cluster.slurm, present=present, resolved=resolve(node))[0]


def _sample(config: RunConfig) -> list[PromptRow]:
    train = config.data.train
    return [row for data in train for row in read_rows(data.path, name=data.name, limit=SAMPLE_ROWS)]


def _interval_s(config: RunConfig) -> float | None:
    """Seconds between two checkpoints by the steps that the run has recorded; None before the first step."""
    run_dir = Path(config.run_dir)
    steps = recorded_times(run_dir).steps_s if run_dir.is_dir() else []
    every = config.checkpoint.every or config.num_steps
    return every * sum(steps[-5:]) / len(steps[-5:]) if steps else None


def _existing(path: Path) -> Path:
    target = path.absolute()
    return next(place for place in (target, *target.parents) if place.is_dir())


def _line(check: Check) -> str:
    word, colour = ("FAIL", RED) if check.problem else ("ok", GREEN)
    mark = f"{colour}{word:4}{PLAIN}" if sys.stdout.isatty() else f"{word:4}"
    return f"{mark}{check}"
