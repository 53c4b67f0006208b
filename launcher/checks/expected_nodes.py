"""The nodes of a SLURM job before it has them: `cluster.slurm`, and inside an allocation the node of this process."""

from collections.abc import Sequence
from dataclasses import replace

from launcher.cluster.node import JobGpu, NodeResources, job_nodes
from launcher.cluster.slurm_step import in_allocation
from launcher.config.slurm import SlurmConfig
from launcher.estimate.hardware import GPUS


def expected_nodes(slurm: SlurmConfig, local: NodeResources) -> tuple[NodeResources, ...]:
    """The nodes that a job will have; `local` is the node of this process."""
    return job_nodes(slurm, local.cpu_cores, job_gpu(slurm, local, in_allocation=in_allocation()))


def like_this_node(nodes: Sequence[NodeResources], local: NodeResources) -> tuple[NodeResources, ...]:
    """Expected nodes with the free memory of the node of this process, which is one of them. Pure."""
    available, shared = local.available_bytes, local.shared_bytes
    return tuple(replace(node, available_bytes=available, shared_bytes=shared) for node in nodes)


def job_gpu(slurm: SlurmConfig, local: NodeResources, *, in_allocation: bool) -> JobGpu:
    """A GPU of the job: `cluster.slurm.gpu`, else a `local` one on a node of the job, else one of 80 GB. Pure.

    GPUs of a login node say nothing about those of the job.
    """
    if slurm.gpu:
        return JobGpu(memory_bytes=GPUS[slurm.gpu].memory_bytes, capability=GPUS[slurm.gpu].capability)
    if in_allocation and local.gpu_bytes:
        return JobGpu(memory_bytes=local.gpu_bytes[0], capability=local.gpu_capability)
    return JobGpu()


def unknown_gpu_warnings(slurm: SlurmConfig) -> list[str]:
    """A sentence for the user if the kind of the job's GPUs is unknown."""
    if slurm.gpu or not slurm.gpus_per_node or in_allocation():
        return []
    return [f"GPUs of the job are taken to be of 80 GB; `cluster.slurm.gpu` names their kind: {', '.join(GPUS)}"]
