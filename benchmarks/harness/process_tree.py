"""Samples memory, file descriptors and shared memory of a running command and all its descendants.

Memory is the sum of proportional set sizes plus the files in shared memory that no process maps. The proportional set
size (PSS) divides shared pages among the processes that map them; it does not count unmapped files.
"""

import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One sample."""

    seconds: float
    """Seconds since the command started."""
    memory_bytes: int
    """PSS of all processes plus unmapped shared memory."""
    shm_bytes: int
    """All files in shared memory."""
    num_fds: int
    num_processes: int


def usage(root: int, seconds: float) -> Usage:
    """Sample the process `root` and its descendants."""
    pss, fds, count, mapped = 0, 0, 0, set()
    try:
        processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = []
    for process in processes:
        folder = Path("/proc") / str(process.pid)
        try:
            pss += _pss(folder / "smaps_rollup")
            mapped |= _mapped_shm(folder / "maps")
            fds += process.num_fds()
            count += 1
        except (OSError, psutil.Error):
            continue  # the process ended after it was listed
    files = {str(path): path.stat().st_blocks * 512 for path in SHM.iterdir() if path.is_file()}
    unmapped = sum(size for path, size in files.items() if path not in mapped)
    return Usage(
        seconds=seconds,
        memory_bytes=pss + unmapped,
        shm_bytes=sum(files.values()),
        num_fds=fds,
        num_processes=count,
    )


def _pss(rollup: Path) -> int:
    for line in rollup.read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _mapped_shm(maps: Path) -> set[str]:
    lines = maps.read_text().splitlines()
    return {line.split(maxsplit=5)[5].removesuffix(" (deleted)") for line in lines if str(SHM) in line}


def growth(early: Sequence[Usage], late: Sequence[Usage]) -> dict[str, float]:
    """Growth of medians, as a share of the earlier one, by field of `Usage`: memory, descriptors, shared memory."""
    return {
        name: statistics.median(getattr(each, name) for each in late)
        / max(statistics.median(getattr(each, name) for each in early), 1)
        - 1
        for name in ("memory_bytes", "num_fds", "shm_bytes")
    }


def watch(command: Sequence[str], *, log: Path, every_s: float = 2.0) -> tuple[int, float, list[Usage]]:
    """Run `command` with its output in `log`; returns the exit code, the seconds and the samples."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    samples: list[Usage] = []
    with log.open("wb") as output:
        process = subprocess.Popen(list(command), stdout=output, stderr=subprocess.STDOUT)
        done = threading.Event()

        def sample() -> None:
            while not done.wait(every_s):
                samples.append(usage(process.pid, time.perf_counter() - started))

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        code = process.wait()
        done.set()
        thread.join()
    return code, time.perf_counter() - started, samples
