"""The variables that `reward.environment` names: they are set where the command starts.

Processes of `run` and `eval` inherit them, and a SLURM job receives them from the shell that submits it. In a Ray
cluster that a command joins (`cluster.address`) they are those of Ray's own processes, which are not looked at.
"""

import os
from collections.abc import Mapping

from launcher.config.schema import ClusterConfig
from launcher.config.slurm import SlurmConfig
from rollout.config import RewardConfig

ENVIRONMENTS = ("--export-file", "--get-user-env")
"""Options of sbatch that bring variables from elsewhere."""


def unset_problems(config: RewardConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """A problem for each name that `environment` lacks."""
    return [
        f"`reward.environment` names {name}, which is not set here; export it, or remove the name"
        for name in config.environment
        if name not in environment
    ]


def reward_problems(config: RewardConfig, cluster: ClusterConfig) -> list[str]:
    """Problems of a command whose processes inherit the variables of this one, unless it joins a Ray cluster."""
    return unset_problems(config) if cluster.address == "local" else []


def job_reward_problems(config: RewardConfig, slurm: SlurmConfig) -> list[str]:
    """Problems of a job that is submitted from this shell, if nothing else may bring variables to it."""
    return [] if brings_variables(slurm) else unset_problems(config)


def brings_variables(slurm: SlurmConfig) -> bool:
    """Whether a job may have variables that neither this shell nor the user's profile sets."""
    options = any(option.startswith(ENVIRONMENTS) for option in slurm.extra)
    return slurm.container.kind != "none" or bool(slurm.modules) or bool(slurm.template) or options
