"""`traces/engine-N.forwards`: every forward of one engine over a run, 28 bytes each
(`rollout.tracing.forwards.FORWARD`).

The run fetches forwards from the engines after each step and each evaluation, and appends them.

Invariant: a file is a whole number of records before an append. A kill can leave an incomplete record, which would
shift all later ones, so `drop_torn_record` removes it first.
"""

import os
from pathlib import Path

import numpy as np

from history.own_files import opener
from rollout.tracing.forwards import FORWARD, Forwards, decode_forwards


def append_forwards(traces: Path, engine: int, forwards: Forwards) -> None:
    """Append one engine's forwards to its file in the folder `traces`."""
    with open(_path(traces, engine), "ab", opener=opener) as file:
        file.write(forwards.tobytes())


def read_forwards(traces: Path, *, max_bytes: int) -> tuple[list[Forwards], bool]:
    """Forwards of each engine, by its number, and whether older ones were left out to stay within `max_bytes` in total.

    Empty for an engine without a file. An incomplete record is left out.
    """
    by_engine: dict[int, Forwards] = {}
    paths = _paths(traces)
    for path in paths:
        size = _whole(path.stat().st_size)
        num_read = min(size, _whole(max_bytes // len(paths)))
        with path.open("rb") as file:
            file.seek(size - num_read)
            by_engine[int(path.stem.rpartition("-")[2])] = decode_forwards(file.read(num_read))
    total = sum(_whole(path.stat().st_size) for path in paths)
    is_cut = sum(forwards.nbytes for forwards in by_engine.values()) < total
    empty = np.zeros(0, dtype=FORWARD)
    return [by_engine.get(number, empty) for number in range(max(by_engine, default=-1) + 1)], is_cut


def drop_torn_record(traces: Path) -> None:
    """Truncate every engine's file after its last complete record."""
    for path in _paths(traces):
        size = path.stat().st_size
        if size != _whole(size):
            os.truncate(path, _whole(size))


def _path(traces: Path, engine: int) -> Path:
    return traces / f"engine-{engine}.forwards"


def _paths(traces: Path) -> list[Path]:
    return sorted(traces.glob("engine-*.forwards"))


def _whole(num_bytes: int) -> int:
    return num_bytes - num_bytes % FORWARD.itemsize
