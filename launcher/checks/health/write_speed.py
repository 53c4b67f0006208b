"""Write speed of the run directory against the size of a checkpoint and the time between two of them."""

import os
import tempfile
import time
from pathlib import Path

TRIAL_BYTES = 64 << 20
MAX_SHARE = 0.2
"""Of the time between two checkpoints that a save may take if the run waits for it."""
MAX_BACKGROUND_SHARE = 0.8
"""The same if the run goes on; the next save waits for a longer one."""


def write_speed(directory: Path, num_bytes: int = TRIAL_BYTES) -> float:
    """Bytes a second of a file that is written in `directory`, synchronised and removed."""
    block = os.urandom(1 << 20)  # a file system that compresses would be measured too fast with zeros
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-", buffering=0) as file:
        started = time.perf_counter()
        for _ in range(num_bytes >> 20):
            file.write(block)
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - started)


def write_speed_line(
    bytes_per_s: float, checkpoint_bytes: int, *, interval_s: float | None, timeout_s: float, background: bool
) -> tuple[str, list[str]]:
    """Value and problems. Pure.

    Args:
        bytes_per_s: measured speed.
        checkpoint_bytes: estimate of one checkpoint.
        interval_s: seconds between two checkpoints; None before the first step of a run.
        timeout_s: deadline of a save.
        background: whether the run goes on meanwhile.
    """
    save_s = checkpoint_bytes / bytes_per_s
    value = f"{bytes_per_s / 1e6:.0f} MB/s, a checkpoint of about {checkpoint_bytes / 1e6:.0f} MB takes {save_s:.1f} s"
    if save_s > timeout_s:
        return value, [f"a save may take `trainer.timeout_s` = {timeout_s:.0f} s; name a faster disk or raise it"]
    share = MAX_BACKGROUND_SHARE if background else MAX_SHARE
    if interval_s is not None and save_s > share * interval_s:
        return value, [
            f"checkpoints are {interval_s:.0f} s apart, a save may take {share:.0%} of that; raise "
            "`checkpoint.every` or name a faster disk"
        ]
    return value, []
