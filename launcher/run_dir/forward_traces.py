"""`traces/engine-N.forwards`: every forward of one engine over a run, 28 bytes each
(`rollout.tracing.forwards.FORWARD`).

The run fetches forwards from the engines after each step and each evaluation, and appends them; only its controller
writes here. Where older forwards are removed, a file that has grown large is closed first: it becomes
`engine-N.1.forwards`, the next one `engine-N.2.forwards`, and closed files are removed whole, the oldest first.

Invariants: a file is a whole number of records before an append. A kill can leave an incomplete record, which would
shift all later ones, so `drop_torn_record` removes it first. The newest closed file of an engine stays, so a lowest
number above 1 says that older forwards were removed.
"""

import math
import os
import re
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from history.own_files import opener
from rollout.tracing.forwards import FORWARD, Forwards, decode_forwards

PART_BYTES = 4 << 20
"""Least size of a file that is closed: 150,000 forwards."""
_OPEN = sys.maxsize
"""Number of the file to which the run appends: the last one of its engine."""
_NAME = re.compile(r"engine-(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?\.forwards")
"""Files of other names are a person's, and are left alone."""

_FIRST_S = 1e9
"""No run is older; wall clock."""
_DAY_S = 86400.0
"""No forward takes longer, and no clock is farther ahead of that of the reader."""
_CLOCK_S = 1.0
"""By which a corrected clock may let starts fall."""


def append_forwards(traces: Path, engine: int, forwards: Forwards) -> None:
    """Append one engine's forwards to its file in the folder `traces`."""
    with open(traces / f"engine-{engine}.forwards", "ab", opener=opener) as file:
        file.write(forwards.tobytes())


def remove_forwards(traces: Path, before_s: float) -> None:
    """Close large files, and remove closed ones whose forwards all began before a time (wall clock).

    A closed file is removed if the next closed one begins before that time too. So what is left of each engine begins
    before it, and no later forward is missing.
    """
    for engine, files in _files(traces).items():
        appended = files.pop(_OPEN, None)
        if appended is not None and appended.stat().st_size >= PART_BYTES:
            number = max(files, default=0) + 1
            files[number] = appended.rename(traces / f"engine-{engine}.{number}.forwards")
        for path, following in pairwise(files.values()):
            if _begin_s(following) >= before_s:
                break
            path.unlink()


def read_forwards(traces: Path, *, max_bytes: int) -> tuple[list[Forwards], bool]:
    """Forwards of each engine, by its number, and whether older ones are missing: removed, or beyond `max_bytes`.

    `max_bytes` is for all engines together. Empty for an engine without a file. An incomplete record is left out.
    """
    try:
        return _read(traces, max_bytes)
    except FileNotFoundError:  # a run has just closed or removed a file
        return _read(traces, max_bytes)


def sound_forwards(forwards: Forwards) -> Forwards:
    """Without damaged records, whose times are impossible or out of order; shorter if some were.

    Of records that contradict each other, the fewer are taken as damaged.
    """
    starts, seconds = forwards["started_at_s"], forwards["seconds"]
    is_possible = (starts >= _FIRST_S) & (starts <= time.time() + _DAY_S) & (seconds >= 0) & (seconds <= _DAY_S)
    forwards = forwards[is_possible]
    starts = forwards["started_at_s"]
    is_early = starts < np.maximum.accumulate(starts) - _CLOCK_S
    is_late = starts > np.minimum.accumulate(starts[::-1])[::-1] + _CLOCK_S
    return np.asarray(forwards[~(is_early if is_early.sum() <= is_late.sum() else is_late)])


def _read(traces: Path, max_bytes: int) -> tuple[list[Forwards], bool]:
    by_engine: dict[int, Forwards] = {}
    is_cut = False
    of_engines = _files(traces)
    for engine, files in of_engines.items():
        content, is_whole = _newest(files.values(), _whole(max_bytes // len(of_engines)))
        by_engine[engine] = decode_forwards(content)
        is_cut = is_cut or not is_whole or 1 < min(files) < _OPEN
    empty = np.zeros(0, dtype=FORWARD)
    return [by_engine.get(number, empty) for number in range(max(by_engine, default=-1) + 1)], is_cut


def _newest(paths: Iterable[Path], max_bytes: int) -> tuple[bytes, bool]:
    """The last bytes of consecutive files, whole records, and whether they are all."""
    pieces: list[bytes] = []
    left = max_bytes
    for path in reversed(list(paths)):
        with path.open("rb") as file:
            size = _whole(os.fstat(file.fileno()).st_size)
            num_read = min(size, left)
            file.seek(size - num_read)
            pieces.insert(0, file.read(num_read))
        if num_read < size:
            return b"".join(pieces), False
        left -= num_read
    return b"".join(pieces), True


def drop_torn_record(traces: Path) -> None:
    """Truncate every engine's file after its last complete record."""
    for files in _files(traces).values():
        if (path := files.get(_OPEN)) is not None:
            size = path.stat().st_size
            if size != _whole(size):
                os.truncate(path, _whole(size))


def _files(traces: Path) -> dict[int, dict[int, Path]]:
    """Files of each engine: by the engine's number, then by their own, both ascending."""
    found: dict[int, dict[int, Path]] = {}
    for path in traces.glob("engine-*.forwards"):
        if name := _NAME.fullmatch(path.name):
            found.setdefault(int(name[1]), {})[int(name[2] or _OPEN)] = path
    return {engine: dict(sorted(files.items())) for engine, files in sorted(found.items())}


def _begin_s(path: Path) -> float:
    """When the first forward of a closed file began, wall clock; before all time in a file without a whole record."""
    with path.open("rb") as file:
        record = file.read(FORWARD.itemsize)
    return float(decode_forwards(record)["started_at_s"][0]) if len(record) == FORWARD.itemsize else -math.inf


def _whole(num_bytes: int) -> int:
    return num_bytes - num_bytes % FORWARD.itemsize
