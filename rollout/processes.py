"""Environment, output and lifetime of processes.

`ProcessEnv`: environment variables of each kind of process, set before heavy imports. Thread pools and vLLM read their
environment at import. The values therefore go into Ray's `runtime_env` or a child's environment, never into
`os.environ` of a running process. Without them a CPU engine runs 10-90 times slower (OpenMP oversubscription), or all
engines share core 0. Invariant: equal arguments give equal environments.

`redirect_output` sends the output of a process and its children to a file of the run directory. It redirects file
descriptors, not Python objects, because vLLM, gloo and the allocator write to descriptors directly.

`write_stacks_on_signal` lets a process write its threads' stacks (`rollout.stacks`). `kill_processes` ends processes
that hang.

`no_collection` saves collections of garbage while large libraries are imported.

`die_with` ends the processes of an engine with the process that owns the engine. vLLM's core process survives its
parent and keeps its memory (on a GPU: the device's). A killed owner cannot clean up, so its children watch it.
Invariant: only this process and those between it and its owner are killed.
"""

import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from history.own_files import opener
from history.process_stat import start_ticks, stat_fields
from rollout.progress import page_descriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnv:
    """Environments of the processes of one run."""

    single_node: bool
    """All processes share one node: collectives may use the loopback device."""

    def controller(self) -> dict[str, str]:
        """Environment of the controller, which does no heavy computation."""
        return self._threads(1) | _OFFLINE

    def trainer_rank(self, *, threads: int, is_deterministic: bool = False) -> dict[str, str]:
        """Environment of one trainer rank.

        Args:
            threads: OpenMP threads.
            is_deterministic: whether libraries of GPUs use only algorithms that repeat their bits.
        """
        repeating = {name: values[0] for name, values in DETERMINISTIC.items()} if is_deterministic else {}
        return self._threads(threads) | self._network() | _OFFLINE | _MEGATRON | repeating

    def engine(self, *, threads: int, cores: tuple[tuple[int, ...], ...] = ()) -> dict[str, str]:
        """Environment of one engine and its children.

        Args:
            threads: OpenMP threads per rank.
            cores: cores to which each rank is bound; empty leaves the placement to the kernel.
        """
        bind = "|".join(",".join(map(str, rank)) for rank in cores) if cores else "nobind"
        binding = {"VLLM_CPU_OMP_THREADS_BIND": bind}
        return self._threads(threads) | self._network() | _OFFLINE | _VLLM | HEAP | binding

    def single_threaded(self) -> dict[str, str]:
        """Environment of a process that computes with one thread: text, history."""
        return self._threads(1) | _OFFLINE

    def _threads(self, threads: int) -> dict[str, str]:
        # numba's OpenMP layer resets the thread count of the whole process, hence 1 whatever `threads` is
        return {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OPENBLAS_NUM_THREADS": str(threads),
            "NUMBA_NUM_THREADS": "1",
        }

    def _network(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"} if self.single_node else {}


ALL_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Variables of a process that sees the devices of its node. Without them Ray hides devices that it has not assigned."""


def on_devices(devices: Sequence[str]) -> dict[str, str]:
    """Variables that make only these devices visible to a process, numbered in this order; none for no devices.

    `devices` are numbers or identifiers as in CUDA_VISIBLE_DEVICES.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices), **ALL_DEVICES} if devices else {}


def given_devices(environment: Mapping[str, str]) -> str:
    """The devices that `on_devices` has named in a process's variables, separated by commas; empty for none.

    A user's own CUDA_VISIBLE_DEVICES gives no device to a process that is placed on the CPU.
    """
    return environment.get("CUDA_VISIBLE_DEVICES", "") if environment.items() >= ALL_DEVICES.items() else ""


_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MALLOC_ARENA_MAX": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Allocator settings of an engine: layers reuse the memory of other layers, and new memory comes in huge pages.

Loading a publish on a CPU allocates every layer twice, in checkpoint layout and repacked, and the kernel provides new
pages one by one. The thread that receives buckets would get a separate arena, which glibc returns as soon as it is
empty.
"""

_MEGATRON = {
    # kernels start in the order of their calls, so communication of tensor parallelism overlaps with products
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}

DETERMINISTIC: Mapping[str, tuple[str, ...]] = {
    # Transformer Engine's attention; Megatron builds no deterministic model without it
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    # torch names both values: with others, products on several streams may not repeat
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    # sums that switches compute (NVLS, between nodes NVLSTree) have no fixed order
    "NCCL_ALGO": ("^NVLS,NVLSTree", "Ring", "Tree"),
}
"""Variables of a deterministic trainer rank, and their values that keep it so; the first one is set."""

_VLLM = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # on CPU this puts the only rank of an engine into its core process: one process and 14 s less
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # of a forward, by the clock: a suspended job goes on later, and `engine.progress_timeout_s` finds engines that hang
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(30 * 24 * 3600),
    # the engine counts emitted tokens between two turns of its event loop; see `rollout.worker.vllm_compat.drain`
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "1048576",
    # model runner 2, which vLLM >= 0.25 prefers on GPUs, has no `input_batch`, which the sampler and the drafts read
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # DeepGEMM compiles kernels while an engine starts, and may rewrite scales as powers of two when weights are loaded
    "VLLM_USE_DEEP_GEMM": "0",
}

OVERRIDABLE = (*HEAP, "VLLM_USE_DEEP_GEMM", *DETERMINISTIC)
"""Variables of a process for which the value in the environment of a run takes precedence."""


def contradictions(environment: Mapping[str, str]) -> list[str]:
    """Why a trainer rank with these variables may not be deterministic, with the fix. Absent ones are no reason."""
    return [
        f"{name} = {environment[name]} in the environment, with which a deterministic trainer may not repeat its bits "
        f"or not start; unset it, or set it to {' or '.join(values)}"
        for name, values in DETERMINISTIC.items()
        if environment.get(name, values[0]).lower() not in map(str.lower, values)
    ]


VARIABLE = "MEGATRON_RL_LOG"
"""Environment variable that names the log file; the parent process sets it."""

NODE = "{node}"
"""In that name: the host name of the process's node."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause garbage collection, for imports of large libraries.

    What an import creates stays alive, so collections in between scan all of it again and again, and free nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def redirect_output() -> None:
    """Append standard output and error to the file that `VARIABLE` names; nothing without it."""
    named = os.environ.get(VARIABLE)
    if not named:
        return
    path = Path(named.replace(NODE, socket.gethostname()))
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process of the cluster. Different values count as different processes, for example as a restarted one."""

    node_id: str
    """Ray's id of its node; a machine that boots again becomes another node."""
    pid: int
    start_ticks: int
    """Its start, as `history.process_stat` reads it: process ids are used again, and a wall clock may be set."""
    log: str = ""
    """Its log file, where `VARIABLE` named one; the name of the node is in it."""
    page: int = -1
    """Descriptor of its `rollout.progress` page; -1 if it leaves no marks."""
    host: str = ""
    """Name of its machine, for messages."""
    children: tuple[tuple[int, int], ...] = ()
    """(pid, start_ticks) of processes below it that may outlive it; empty where nobody has looked."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.host else f"process {self.pid}"

    @classmethod
    def of_this_process(cls, node_id: str) -> "ProcessId":
        """This process, on a node of this id."""
        pid = os.getpid()
        return cls(
            node_id=node_id,
            pid=pid,
            start_ticks=start_ticks(pid),
            log=os.environ.get(VARIABLE, ""),
            page=page_descriptor(),
            host=socket.gethostname(),
        )

    def with_children(self) -> "ProcessId":
        """The same process of this node with all that it has started, directly or not, and that live now."""
        found = []
        for child in children(psutil.Process(self.pid), recursive=True):
            with suppress(FileNotFoundError, ProcessLookupError):
                found.append((child.pid, start_ticks(child.pid)))
        return replace(self, children=tuple(found))

    def stacks_file(self, when: str) -> Path | None:
        """File for the stacks of the process, on its node; None if it has no log."""
        if not self.log:
            return None
        log = Path(self.log)
        logs = log.parent.parent if log.parent.name == NODE else log.parent
        return logs / STACKS / socket.gethostname() / f"{log.stem}-{when}.txt"


STACKS = "stacks"
"""Folder of the stacks of processes that hung, in the folder of the logs."""
STACKS_SIGNAL = signal.SIGUSR1
_END_S = 20.0
"""Longest time in which a killed process ends and its device memory becomes free."""


def write_stacks_on_signal() -> None:
    """Write the stacks of all threads to standard error whenever `STACKS_SIGNAL` arrives."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    """Children of a process, or all below it. psutil's method fails where other users' are hidden (`hidepid=1`)."""
    by_parent: dict[int, list[int]] = {}
    for pid in psutil.pids():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            by_parent.setdefault(int(stat_fields(pid)[1]), []).append(pid)
    found: dict[int, psutil.Process] = {}
    waiting = list(by_parent.get(process.pid, []))
    while waiting:
        pid = waiting.pop(0)
        with suppress(psutil.NoSuchProcess):
            if pid not in found:
                found[pid] = psutil.Process(pid)
                waiting += by_parent.get(pid, []) if recursive else []
    return list(found.values())


def family(process: ProcessId) -> list[psutil.Process]:
    """A process of this node and its children, also known ones that have outlived it; without those that have ended."""
    members: dict[int, psutil.Process] = {}
    for pid, ticks in ((process.pid, process.start_ticks), *process.children):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            root = psutil.Process(pid)
            if start_ticks(pid) == ticks:
                members |= {member.pid: member for member in (root, *children(root, recursive=True))}
    return list(members.values())


def kill_processes(processes: Sequence[ProcessId]) -> int:
    """Kill processes of this node and their children; returns their number once they have ended."""
    members = [member for process in processes for member in family(process)]
    send_signal(members, signal.SIGKILL)
    psutil.wait_procs(members, timeout=_END_S)
    return len(members)


def send_signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those of the processes that have not ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


_POLL_S = 1.0


def die_with(owner_pid: int) -> None:
    """End this process, and those between it and its owner, soon after the owner has ended.

    No effect if `owner_pid` is no ancestor of this process.
    """
    me = psutil.Process()
    ancestors = _ancestors(me)
    pids = [process.pid for process in ancestors]
    if owner_pid not in pids:
        return
    owner = ancestors[pids.index(owner_pid)]
    between = ancestors[: pids.index(owner_pid)]
    threading.Thread(target=_watch, args=(owner, between), name="owner-watch", daemon=True).start()


def _ancestors(process: psutil.Process) -> list[psutil.Process]:
    """The parent first, up to the first that is hidden from this user."""
    found: list[psutil.Process] = []
    with suppress(psutil.AccessDenied):
        while (parent := (found[-1] if found else process).parent()) is not None:
            found.append(parent)
    return found


def _watch(owner: psutil.Process, between: list[psutil.Process]) -> None:
    while _is_alive(owner):
        time.sleep(_POLL_S)
    for process in between:
        if process.is_running():
            process.kill()
    os._exit(1)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
