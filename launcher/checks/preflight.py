"""Checks the machine before a run of many minutes: one line per check, with the fix if the check fails.

Starts no cluster. `--dry-run` of a command checks the needs of its configuration.
"""

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from launcher.checks.memory import gib
from launcher.cluster.node import NodeResources, cpu_model, gpu_names, node_resources

PYTHONS = ((3, 11), (3, 12))
MIN_DISK_BYTES = 2 << 30
"""Checkpoints, samples and an offline wandb run of a small example, and Ray's own files."""
MIN_SHARED_BYTES = 512 << 20
"""Ray's object store and one publish of a small model; containers often have 64 MiB."""
MIN_MEMORY_BYTES = 3 << 30
"""Ray, a trainer rank and an engine of a small model."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line: the subject, its value on this machine and the problem."""

    name: str
    value: str
    """As measured on this machine."""
    problem: str = ""
    """Bound and fix; empty if the check passes."""

    def __str__(self) -> str:
        return f"  {self.name:14} {self.value}" + (f" - {self.problem}" if self.problem else "")


def machine_checks(work: Path) -> list[Check]:
    """All checks of this machine; `work` is the directory that will be written to."""
    node = node_resources()
    return [
        python(sys.version_info[:2]),
        processor(platform.machine(), node),
        memory(node),
        disk("disk", work, MIN_DISK_BYTES, "free some, or name a directory on another disk"),
        disk("shared memory", SHARED_MEMORY, MIN_SHARED_BYTES, "enlarge it (`docker run --shm-size=1g`)"),
        kernels(*cpu_model()),
    ]


def python(version: tuple[int, int]) -> Check:
    """The interpreter's version."""
    known = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    problem = "" if version in PYTHONS else f"needs {known}; make the environment anew: make PYTHON=python3.11"
    return Check(name="python", value=f"{version[0]}.{version[1]}", problem=problem)


def processor(machine: str, node: NodeResources) -> Check:
    """Architecture, cores and devices."""
    devices = f", {len(node.gpu_bytes)} x {gpu_names()[0]}" if node.gpu_bytes else ", no GPU"
    problem = "" if machine == "x86_64" else "needs x86_64, for which the packages are locked; use another machine"
    return Check(name="processor", value=f"{machine}, {node.cpu_cores} core(s){devices}", problem=problem)


def memory(node: NodeResources) -> Check:
    """Memory that can be allocated now."""
    enough = node.available_bytes >= MIN_MEMORY_BYTES
    problem = "" if enough else f"needs {gib(MIN_MEMORY_BYTES)}; end other programs, or raise the container's limit"
    return Check(name="memory", value=f"{gib(node.available_bytes)} available", problem=problem)


def disk(name: str, path: Path, needed_bytes: int, fix: str) -> Check:
    """Free space of the file system of `path`, which need not exist yet."""
    target = path.absolute()
    existing = next(place for place in (target, *target.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Check(name=name, value=str(existing), problem="is not writable for this user; name another directory")
    problem = "" if free >= needed_bytes else f"needs {gib(needed_bytes)}; {fix}"
    return Check(name=name, value=f"{gib(free)} free at {existing}", problem=problem)


def kernels(model: str, flags: list[str]) -> Check:
    """The flags by which kernels are chosen; whether a kernel is right is tested by the engine when it starts."""
    problem = "" if "avx2" in flags else "vLLM's CPU kernels need AVX2; use a newer processor"
    return Check(name="kernels", value=f"{model}: {', '.join(flags) or 'none of the known flags'}", problem=problem)
