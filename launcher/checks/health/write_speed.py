"""Write speed of the run directory against the size of a checkpoint and the time between two of them.

All trainer ranks write a checkpoint at the same time, each its part by several threads. So as many files are measured
as one node will write, against the part of that node. A file server may give each of many nodes less than one alone.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILES_PER_RANK = 2
"""That a trainer rank writes at the same time (`megatron_rl.checkpoints.writer`, which imports torch)."""
TRIAL_BYTES = 32 << 20
"""Of each file."""
MAX_SHARE = 0.2
"""Of the time between two checkpoints that a save may take if the run waits for it."""
MAX_BACKGROUND_SHARE = 0.8
"""The same if the run goes on; the next save waits for a longer one."""


def write_speed(directory: Path, num_files: int, num_bytes: int = TRIAL_BYTES) -> float:
    """Bytes a second of files that are written in `directory` at the same time, synchronised and removed.

    Each of the `num_files` has `num_bytes`, rounded down to MiB.
    """
    block = os.urandom(1 << 20)  # a file system that compresses would be measured too fast with zeros

    def write(_: int) -> float:
        """When the file is synchronised."""
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-", buffering=0) as file:
            for _ in range(num_bytes >> 20):
                file.write(block)
            os.fsync(file.fileno())
            return time.perf_counter()

    with ThreadPoolExecutor(num_files) as threads:
        started = time.perf_counter()
        ended = max(threads.map(write, range(num_files)))
    return num_files * num_bytes / (ended - started)


def write_speed_line(
    bytes_per_s: float,
    checkpoint_bytes: int,
    *,
    share: float,
    interval_s: float | None,
    timeout_s: float,
    background: bool,
) -> tuple[str, list[str]]:
    """Value and problems. Pure.

    Args:
        bytes_per_s: measured speed of one node.
        checkpoint_bytes: estimate of one checkpoint.
        share: part of it that this node writes, above 0 and at most 1.
        interval_s: seconds between two checkpoints; None before the first step of a run.
        timeout_s: deadline of a save.
        background: whether the run goes on meanwhile.
    """
    save_s = share * checkpoint_bytes / bytes_per_s
    part = "a checkpoint" if share == 1 else f"one node's {share:.1%} of a checkpoint"
    value = f"{bytes_per_s / 1e6:.0f} MB/s, {part} of about {checkpoint_bytes / 1e6:.0f} MB takes {save_s:.1f} s"
    if save_s > timeout_s:
        return value, [f"a save may take `trainer.timeout_s` = {timeout_s:.0f} s; name a faster disk or raise it"]
    most = MAX_BACKGROUND_SHARE if background else MAX_SHARE
    if interval_s is not None and save_s > most * interval_s:
        return value, [
            f"checkpoints are {interval_s:.0f} s apart, a save may take {most:.0%} of that; raise "
            "`checkpoint.every` or name a faster disk"
        ]
    return value, []
