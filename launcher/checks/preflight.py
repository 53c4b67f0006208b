"""Checks the machine before a run of many minutes: one line per check, with the fix if the check fails.

The last check takes some seconds: it imports vLLM in another process and multiplies test matrices in INT8, as an engine
does when it starts. No cluster is started. `--dry-run` of a command checks the needs of its configuration.
"""

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.node import NodeResources, cpu_model, gpu_names, node_resources
from launcher.config.schema import RunConfig
from launcher.estimate.disk import HeldBytes, record_bytes, run_bytes
from launcher.estimate.tables import gib
from megatron_rl.memory import FurtherSpecs
from megatron_rl.model.spec import ModelSpec
from rollout.processes import ProcessEnv

PYTHONS = ((3, 11), (3, 12))
MIN_DISK_BYTES = 2 << 30
"""Checkpoints, samples and an offline wandb run of a small example, and Ray's own files."""
MIN_SHARED_BYTES = 512 << 20
"""Ray's object store and one publish of a small model; containers often have 64 MiB."""
MIN_MEMORY_BYTES = 3 << 30
"""Ray, a trainer rank and an engine of a small model."""
SHARED_MEMORY = Path("/dev/shm")
SELF_TEST = ("-m", "rollout.worker.exact_int8")
"""Arguments of the Python process that tests vLLM's INT8 kernel; its last line says how INT8 is multiplied."""
CPU_LIBRARY = "libnuma.so.1"
"""Library of the system that vLLM's CPU kernels are linked with; no package of the lock holds it."""
SELF_TEST_TIMEOUT_S = 600.0
"""Deadline of the self-test; a process that is still running then hangs."""


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
        kernels(node, *cpu_model()),
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


def run_disk(directory: Path, config: RunConfig, spec: ModelSpec, further: FurtherSpecs) -> Check:
    """Free space for what a run writes, beside what its directory holds: see `launcher.estimate.disk`."""
    run_dir = Path(config.run_dir)
    held = HeldBytes(
        checkpoints=_bytes_below(run_dir / "checkpoints"),
        policy=_bytes_below(run_dir / "policy"),
        records=sum(_bytes_below(run_dir / folder) for folder in ("samples", "traces", "wandb")),
    )
    records = f"{gib(record_bytes(config, held))} of it for samples, traces, forwards and wandb's tables"
    fix = (
        "free some, lower `checkpoint.keep_last`, `history.budget_bytes` or `wandb.sample_rows`, or set "
        "`checkpoint.keep_last_samples`"
    )
    return disk("disk", directory, run_bytes(config, spec, further, held), f"{records}; {fix}")


def _bytes_below(folder: Path) -> int:
    """Bytes of all files below `folder`, which may be missing; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # of a run that goes on meanwhile
                found = Path(parent, name).lstat()
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def kernels(node: NodeResources, model: str, flags: list[str]) -> Check:
    """The kernels of vLLM on this machine: how INT8 is multiplied, or why the kernels do not run.

    A kernel with wrong products is no problem: engines replace it. Without AVX2 the self-test would end by an illegal
    instruction, because AVX2 is the lowest instruction set that vLLM's CPU kernels are built for. Without
    `CPU_LIBRARY` vLLM starts without its kernels, and the self-test would name one of those.
    """
    if not node.gpu_bytes and "avx2" not in flags:
        problem = "vLLM's CPU kernels need AVX2; use a newer processor"
        return Check(name="kernels", value=f"{model} without AVX2", problem=problem)
    if not node.gpu_bytes and not _is_loadable(CPU_LIBRARY):
        problem = f"vLLM's CPU kernels need {CPU_LIBRARY}; install the system's package libnuma1 (Fedora: numactl-libs)"
        return Check(name="kernels", value=f"{model} without {CPU_LIBRARY}", problem=problem)
    environment = {**os.environ, **ProcessEnv(single_node=True).engine(threads=node.cpu_cores)}
    try:
        done = subprocess.run(
            [sys.executable, *SELF_TEST],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SELF_TEST_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        failure = f"no result after {SELF_TEST_TIMEOUT_S:.0f} s"
    else:
        if done.returncode == 0 and done.stdout.strip():
            return Check(name="kernels", value=done.stdout.strip().splitlines()[-1])
        failure = _failure(done)
    machine = f"{model} ({', '.join(flags) or 'none of the known flags'})"
    return Check(
        name="kernels",
        value=f"{machine}: the test of vLLM's kernels failed: {failure}",
        problem=f"remove the environment and run `make setup`; `python {' '.join(SELF_TEST)}` shows the whole error",
    )


def _is_loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    """The signal that ended a process, or the last line of its error output."""
    if done.returncode < 0:
        return f"the process ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode} without a message"
