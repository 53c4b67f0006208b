"""Lines of one node: files, packages, GPUs, shared memory, disk, open files, clock. Pure.

The problems are those that a SLURM job finds by `launcher.cluster.health`; here each subject has a line of its own.
"""

from collections.abc import Callable

from launcher.checks.health.cpu_packages import gpu_problems
from launcher.checks.health.health_check import HealthCheck
from launcher.cluster.health import NodeFacts, NodeNeeds, problems_by_subject

REQUIRED = ("torch", "vllm", "megatron-core", "ray", "transformers", "numpy", "numba")
"""Packages without which no run starts; vLLM's build for CPUs has a name of its own."""


def node_checks(facts: NodeFacts, needs: NodeNeeds) -> list[HealthCheck]:
    """A check for each subject of the node."""
    values = {
        "files": f"{len(needs.paths) - len(facts.unreadable)} of {len(needs.paths)} paths are readable",
        "packages": f"{len(facts.packages)} present",
        "GPUs": f"{facts.num_gpus}",
        "shared memory": f"{facts.shm_bytes} bytes free",
        "temporary disk": f"{facts.disk_bytes} bytes free in {needs.temp_dir}",
        "open files": f"{facts.open_files} allowed",
        "clock": f"{facts.clock_skew_s:+.2f} s off the file server's",
    }
    problems = problems_by_subject(facts, needs)
    present = {name.removesuffix("-cpu") for name in facts.packages}
    missing = [
        f"{name} is missing; install requirements/cpu.txt or cuda.txt" for name in REQUIRED if name not in present
    ]
    problems["packages"] = [*problems["packages"], *missing, *gpu_problems(facts.num_gpus, facts.packages)]
    if problems["files"]:
        problems["files"] = [*problems["files"], "checks of model, data and reward have not run"]
    return [HealthCheck(name=name, measure=_constant(value, problems[name])) for name, value in values.items()]


def _constant(value: str, problems: list[str]) -> Callable[[], tuple[str, list[str]]]:
    return lambda: (value, problems)
