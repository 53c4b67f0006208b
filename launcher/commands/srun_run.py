"""`srun --ntasks-per-node=1 megatron-rl run CONFIG`: the tasks of one SLURM step start a run together.

Each task does on its node what the batch script of `megatron-rl slurm` starts there: checks, a sum over
the nodes, Ray. The first task also chooses, and drives the run. They find each other by the same files
(`launcher.cluster.job_folder`). Nothing is requeued and no node is spare: a person started the step.

Invariant: all tasks read the configuration that the first one has written, so the plan and Ray agree on each node.
"""

import json
import os
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from launcher.checks.check import check_run
from launcher.checks.expected_nodes import expected_nodes
from launcher.checks.health.cpu_packages import gpu_problems
from launcher.checks.health.reward_environment import unset_problems
from launcher.checks.health.wandb import run_problems
from launcher.cluster.job_folder import VARIABLE, JobFolder
from launcher.cluster.node import NodeResources, node_resources, package_versions
from launcher.cluster.slurm_step import SlurmStep
from launcher.commands.job_checks import LOCK_TIMEOUT_S, check, choose, reduce, refuse_in_use
from launcher.commands.job_state import node_name, say
from launcher.commands.slurm import CONFIG, FOLDER, PACKAGES, job_config
from launcher.commands.slurm_job import drive, node
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from launcher.run_dir.atomic_files import replace_text
from rollout.failures import DeadlineError

BEGIN_TIMEOUT_S = 300.0
"""For which the tasks of a step wait for each other before Ray starts."""


def run_as_task(config: RunConfig) -> int:
    """Do this task's part of the run; returns the exit code of the run in the first task, 0 in the others.

    Raises:
        ConfigError: the step does not have one task on each node, or the run cannot be run on its nodes.
        LaunchError: the names of the step's nodes cannot be read.
        RunDirectoryError: another run has the run directory.
        DeadlineError: another task did not begin.
    """
    step = SlurmStep.of_this_process(node_name())
    here = node_resources()
    config = _config_of_step(config, step, num_gpus=len(here.gpu_bytes))
    path = Path(config.run_dir) / FOLDER / step.name
    folder = JobFolder(path=path, config=path / CONFIG)
    os.environ |= {
        VARIABLE: str(folder.path),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder.path / "token"),
    }
    try:
        return _first(config, folder, step, here) if step.is_first else _other(folder)
    except (ValueError, DeadlineError):
        if folder.path.is_dir():
            folder.note_lost_node()
        raise
    finally:
        if step.is_first:
            _end_others(folder)


def _end_others(folder: JobFolder) -> None:
    """Tell the other tasks that the run is over, also where it was refused before they had begun."""
    with suppress(OSError):  # the run directory may be what was refused; the others then meet their own deadline
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / "over").touch()


def _config_of_step(config: RunConfig, step: SlurmStep, *, num_gpus: int) -> RunConfig:
    """The configuration of the step's nodes; `num_gpus` are those that this node sees."""
    if step.num_tasks != len(step.nodes):
        raise ConfigError(
            f"the SLURM step has {step.num_tasks} tasks on {len(step.nodes)} node(s); start one on each node: "
            "srun --ntasks-per-node=1 megatron-rl run CONFIG"
        )
    slurm = config.cluster.slurm
    if slurm.nodes not in (1, len(step.nodes)):
        raise ConfigError(f"`cluster.slurm.nodes` = {slurm.nodes}, but the SLURM step has {len(step.nodes)} nodes")
    num_gpus = slurm.gpus_per_node or num_gpus
    slurm = slurm.model_copy(update={"nodes": len(step.nodes), "spares": 0, "gpus_per_node": num_gpus})
    return job_config(config.model_copy(update={"cluster": config.cluster.model_copy(update={"slurm": slurm})}))


def _first(config: RunConfig, folder: JobFolder, step: SlurmStep, here: NodeResources) -> int:
    found = [*run_problems(config.wandb), *unset_problems(config.reward)]
    found += gpu_problems(len(here.gpu_bytes), package_versions())
    checked = check_run(config, expected_nodes(config.cluster.slurm, here), found)
    for warning in checked.warnings:
        say(f"warning: {warning}")
    # a node of an earlier start may have died with the lock
    refuse_in_use(folder.run_dir, timeout_s=LOCK_TIMEOUT_S if step.is_requeued else 0)
    _write_files(config, folder, step)
    check(config, folder)
    _wait(folder, [folder.check_file(name) for name in step.nodes], "checked its node")
    if code := choose(config, folder):
        return code
    reduce(config, folder)
    line = [sys.executable, "-m", "launcher.commands.slurm_job", "node", str(folder.config)]
    ray = subprocess.Popen(line)
    try:
        return drive(config, folder)
    finally:
        (folder.path / "over").touch()
        ray.wait()


def _other(folder: JobFolder) -> int:
    if not _wait(folder, [folder.path / "allocated"], "begun the run"):
        return 0
    config = load(RunConfig, folder.config)
    check(config, folder)
    if not _wait(folder, [folder.path / "nodes"], "chosen the nodes"):
        return 0
    reduce(config, folder)
    return node(config, folder)


def _write_files(config: RunConfig, folder: JobFolder, step: SlurmStep) -> None:
    """Files that the batch script writes; `allocated` is the last, because the other tasks wait for it."""
    folder.path.mkdir(parents=True)
    (folder.run_dir / "logs").mkdir(exist_ok=True)
    token = os.open(folder.path / "token", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(token, "w") as file:
        file.write(secrets.token_hex(32))
    replace_text(folder.config, resolved_yaml(config))
    replace_text(folder.config.parent / PACKAGES, json.dumps(package_versions()) + "\n")
    replace_text(folder.path / "allocated", "".join(f"{name}\n" for name in step.nodes))


def _wait(folder: JobFolder, paths: list[Path], done: str) -> bool:
    return folder.wait_for(paths, BEGIN_TIMEOUT_S, f"a task has not {done}; see the output of srun")
