"""Environment variables of each kind of process, to be set before anything heavy is imported.

Thread pools and vLLM read their environment when they are imported, so the values go into Ray's
`runtime_env` (or into a child's environment), never into `os.environ` of a running process. Without
them a CPU engine runs 10-90 times slower (OpenMP oversubscription) or shares core 0 with every other.

Invariant: pure; equal arguments give equal environments.

`redirect_output` sends what a process prints, and what its children print, to a file of the run directory.

File descriptors are redirected, not Python objects: vLLM, gloo and the allocator write to them directly.

`die_with`: processes of an engine end with the process that owns it.

vLLM's core process survives the death of the process that started it, with its memory (on a GPU: the
device's). An owner that is killed cannot clean up, so its children watch it.

Invariant: nothing is killed but this process and those between it and its owner.
"""

import os
import sys
import threading
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnv:
    """Environments of the processes of one run."""

    single_node: bool
    """All processes share one node: collectives may be told to use the loopback device."""

    def controller(self) -> dict[str, str]:
        """Environment of the controller, which computes nothing."""
        return self._threads(1) | _OFFLINE

    def trainer_rank(self, *, threads: int) -> dict[str, str]:
        """Environment of one trainer rank with `threads` OpenMP threads."""
        return self._threads(threads) | self._network() | _OFFLINE

    def engine(self, *, threads: int, cores: tuple[tuple[int, ...], ...] = ()) -> dict[str, str]:
        """Environment of one engine and its children.

        Args:
            threads: OpenMP threads per rank.
            cores: cores that each rank is bound to; empty leaves the placement to the kernel.
        """
        bind = "|".join(",".join(map(str, rank)) for rank in cores) if cores else "nobind"
        own = {"VLLM_CPU_OMP_THREADS_BIND": bind}
        return self._threads(threads) | self._network() | _OFFLINE | _VLLM | HEAP | own

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


def on_devices(devices: tuple[int, ...]) -> dict[str, str]:
    """Variables of a process that is to see these devices and number them in this order; none for ().

    Ray would hide devices that it has not given out itself.
    """
    if not devices:
        return {}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


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
"""Of an engine: layers get memory that other layers have had, and new memory in huge pages.

Loading a publish on a CPU allocates every layer twice, in checkpoint layout and repacked, and new pages come from the
kernel one by one. A thread that receives buckets would have an arena of its own, which glibc gives back as soon as it
is empty. What the environment of a run sets is kept.
"""

_VLLM = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # on CPU this puts the only rank of an engine into its core process: one process and 14 s less
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # the engine counts emitted tokens between two turns of its event loop; see `rollout.worker.vllm_compat.drain`
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "1048576",
}


VARIABLE = "MEGATRON_RL_LOG"
"""Environment variable that names the file; set by whoever starts the process."""


def redirect_output() -> None:
    """Append standard output and error to the file that `VARIABLE` names; nothing without it."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


_POLL_S = 1.0


def die_with(owner_pid: int) -> None:
    """End this process, and those between it and its owner, soon after the owner has ended."""
    me = psutil.Process()
    ancestors = me.parents()
    pids = [process.pid for process in ancestors]
    if owner_pid not in pids:
        return
    owner = ancestors[pids.index(owner_pid)]
    between = ancestors[: pids.index(owner_pid)]
    threading.Thread(target=_watch, args=(owner, between), name="owner-watch", daemon=True).start()


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
