"""The SLURM step of this process, from SLURM's variables: its nodes, its tasks and its place among them."""

import os
from dataclasses import dataclass

from launcher.cluster.node import command_output


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """A SLURM step; a step of one node without SLURM."""

    nodes: tuple[str, ...]
    num_tasks: int
    job_id: int
    name: str
    """Of the job and the step; the same on all nodes."""
    is_first: bool
    """Whether this process is the first task."""

    @classmethod
    def of_this_process(cls, node: str) -> "SlurmStep":
        """Reads SLURM's variables; `node` is the name of this node."""
        listed = os.environ.get("SLURM_STEP_NODELIST", "")
        nodes = command_output(["scontrol", "show", "hostnames", listed]).split() if listed else []
        job = os.environ.get("SLURM_JOB_ID", "0")
        return cls(
            nodes=tuple(nodes) or (node,),
            num_tasks=int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")),
            job_id=int(job),
            name=f"{job}.{os.environ.get('SLURM_STEP_ID', os.getpid())}",
            is_first=os.environ.get("SLURM_PROCID", "0") == "0",
        )


def in_allocation() -> bool:
    """Whether this process runs inside an allocation of SLURM."""
    return "SLURM_JOB_ID" in os.environ


def has_several_tasks() -> bool:
    """Whether this process is one of several tasks of a SLURM step."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
