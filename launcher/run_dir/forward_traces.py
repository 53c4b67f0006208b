"""`traces/engine-N.forwards`: every forward of one engine over a run, 28 bytes each
(`rollout.tracing.forwards.FORWARD`).

They are drained from the engines at the end of each step and of each evaluation, and are appended as they come.

Invariant: a file that somebody appends to is a whole number of records; a kill in the middle of one is mended before
that (`drop_torn_record`), since every record behind it would be read at the wrong place.
"""

import os
from pathlib import Path

import numpy as np

from rollout.tracing.forwards import FORWARD, Forwards, decode_forwards


def append_forwards(traces: Path, engine: int, forwards: Forwards) -> None:
    """Append one engine's forwards to its file in the folder `traces`."""
    with _path(traces, engine).open("ab") as file:
        file.write(forwards.tobytes())


def read_forwards(traces: Path, *, max_bytes: int) -> tuple[list[Forwards], bool]:
    """Forwards of each engine, by its number, and whether older ones were left out to stay within `max_bytes` in all.

    Empty for an engine without a file. A record that is torn is left out.
    """
    found: dict[int, Forwards] = {}
    paths = _paths(traces)
    for path in paths:
        size = _whole(path.stat().st_size)
        kept = min(size, _whole(max_bytes // len(paths)))
        with path.open("rb") as file:
            file.seek(size - kept)
            found[int(path.stem.rpartition("-")[2])] = decode_forwards(file.read(kept))
    total = sum(_whole(path.stat().st_size) for path in paths)
    is_cut = sum(forwards.nbytes for forwards in found.values()) < total
    empty = np.zeros(0, dtype=FORWARD)
    return [found.get(number, empty) for number in range(max(found, default=-1) + 1)], is_cut


def drop_torn_record(traces: Path) -> None:
    """Cut every engine's file after its last whole record."""
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
