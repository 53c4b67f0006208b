"""The SLURM step of this process, from SLURM's variables: its nodes, its tasks and its place among them.

No command of SLURM is called, because containers often have none.
"""

import itertools
import os
import re
import socket
from dataclasses import dataclass

from launcher.errors import LaunchError

_RANGE = r"\d+(?:-\d+)?"
_RANGES = rf"\[{_RANGE}(?:,{_RANGE})*\]"
_NAME = rf"(?:[^\[\],\s]|{_RANGES})+"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """A SLURM step; a step of one node without SLURM."""

    nodes: tuple[str, ...]
    num_tasks: int
    job_id: int
    name: str
    """JOB.RESTART.STEP: the same on all nodes, and another one after SLURM has requeued the job."""
    is_first: bool
    """Whether this process is the first task."""
    is_requeued: bool = False
    """Whether SLURM has started the job before."""

    @classmethod
    def of_this_process(cls, node: str) -> "SlurmStep":
        """Reads SLURM's variables; `node` is the name of this node.

        Raises:
            LaunchError: SLURM_STEP_NODELIST is no host list.
        """
        listed = os.environ.get("SLURM_STEP_NODELIST", "")
        job, restart = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
        return cls(
            nodes=host_names(listed) if listed else (node,),
            num_tasks=int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")),
            job_id=int(job),
            name=f"{job}.{restart}.{os.environ.get('SLURM_STEP_ID', os.getpid())}",
            is_first=os.environ.get("SLURM_PROCID", "0") == "0",
            is_requeued=restart != "0",
        )


def host_names(listed: str, *, variable: str = "SLURM_STEP_NODELIST") -> tuple[str, ...]:
    """Names in a host list of SLURM, for example n1, n2, n07 and m in `n[1-2,07],m`. Pure.

    Raises:
        LaunchError: `listed`, the value of `variable`, is no host list.
    """
    if not re.fullmatch(rf"{_NAME}(?:,{_NAME})*", listed):
        raise LaunchError(
            f"{variable} = {listed!r} is no host list such as n[1-2,07],m; start the command by srun, which "
            "sets the variable"
        )
    names = []
    for name in re.findall(_NAME, listed):
        parts = re.findall(rf"{_RANGES}|[^\[]+", name)
        choices = [_numbers(part[1:-1]) if part[0] == "[" else [part] for part in parts]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return tuple(names)


def _numbers(ranges: str) -> list[str]:
    """Numbers in `1-2,07`; those of a range have at least the digits of the first one."""
    ends = [each.partition("-") for each in ranges.split(",")]
    return [f"{n:0{len(first)}}" for first, _, last in ends for n in range(int(first), int(last or first) + 1)]


def in_allocation() -> bool:
    """Whether this process runs on a node of its allocation of SLURM; errors as for `beside_allocation`."""
    return "SLURM_JOB_ID" in os.environ and not beside_allocation()


def beside_allocation() -> bool:
    """Whether this process belongs to an allocation of SLURM of other nodes, as a shell of `salloc` on a login node.

    Raises:
        LaunchError: SLURM's list of the job's nodes is no host list.
    """
    name = os.environ.get("SLURMD_NODENAME")
    if name is None and "SLURM_PROCID" in os.environ:  # a task in a container, whose host name is its own
        return False
    node = name or socket.gethostname()
    nodes = allocated_nodes()
    return bool(nodes) and {node, node.partition(".")[0]}.isdisjoint(nodes)


def allocated_nodes() -> tuple[str, ...]:
    """Nodes of this process's step, else of its allocation; empty outside one. Errors as for `beside_allocation`."""
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if "SLURM_JOB_ID" in os.environ and (listed := os.environ.get(variable)):
            return host_names(listed, variable=variable)
    return ()


def has_several_tasks() -> bool:
    """Whether this process is one of several tasks of a SLURM step."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
