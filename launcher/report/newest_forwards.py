"""Reads the newest forwards of a run for its report: within a budget, but never less than the last step.

A last step with more forwards than the budget is thinned evenly: one record stands for a few neighbouring forwards, the
same number for all engines. It has the start of the first, their seconds together, and the means of their counts.

Invariants: a pause of `GAP_S` or more stays, and begins at most one record later. Shorter ones, of host work, never add
up to a pause: what would be too long counts as work. But for that, a thinned engine works as long as before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.run_dir.forward_traces import read_forwards, sound_forwards
from rollout.tracing.forwards import FORWARD, Forwards
from rollout.tracing.timeline import GAP_S

_MAX_HOST_S = 0.9 * GAP_S
"""Most host work that one record leaves free behind it; the rest counts as work, so that it is no pause."""
_COUNTS = ("num_running", "num_preempted", "num_scheduled_tokens", "num_context_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestForwards:
    """The newest forwards of all engines."""

    by_engine: Sequence[Forwards]
    """By engine number; empty for an engine without a file."""
    is_cut: bool
    """Whether older forwards are missing: removed, or beyond the budget."""
    forwards_each: int
    """Neighbouring forwards for which a record stands; the last record of an engine may stand for fewer."""
    num_damaged: int = 0
    """Records that were left out, because their times are damaged."""


def newest_forwards(traces: Path, *, since_s: float, max_bytes: int) -> NewestForwards:
    """Forwards of the folder `traces`: all since `since_s` (wall clock), and older ones within `max_bytes`.

    `max_bytes` is for all engines together, an equal part for each. If one has more since then, all begin at `since_s`,
    with the forward that ran then. If all have more together, forwards are thinned evenly.
    """
    found, is_cut, num_damaged = _read_sound(traces, max_bytes)
    missing = {number for number, forwards in enumerate(found) if _begins_after(forwards, since_s)}
    if not is_cut or not missing:
        return NewestForwards(by_engine=found, is_cut=is_cut, forwards_each=1, num_damaged=num_damaged)
    read_bytes = max_bytes
    while missing:
        read_bytes *= 2
        more, _, num_damaged = _read_sound(traces, read_bytes)
        # an engine of which there is no more began later
        grown = {number for number in missing if len(more[number]) > len(found[number])}
        missing = {number for number in grown if _begins_after(more[number], since_s)}
        found = more
    found = [_since(forwards, since_s) for forwards in found]
    each = max(1, -(-sum(forwards.nbytes for forwards in found) // max_bytes))
    thinned = [_thinned(forwards, each) for forwards in found]
    return NewestForwards(by_engine=thinned, is_cut=True, forwards_each=each, num_damaged=num_damaged)


def _read_sound(traces: Path, max_bytes: int) -> tuple[list[Forwards], bool, int]:
    """As `read_forwards`, without damaged records, and how many those are."""
    read, is_cut = read_forwards(traces, max_bytes=max_bytes)
    found = [sound_forwards(forwards) for forwards in read]
    return found, is_cut, sum(map(len, read)) - sum(map(len, found))


def _begins_after(forwards: Forwards, since_s: float) -> bool:
    return len(forwards) > 0 and bool(forwards["started_at_s"][0] > since_s)


def _since(forwards: Forwards, since_s: float) -> Forwards:
    """The forward that ran at `since_s`, if one did, and all later ones."""
    begun = int(np.searchsorted(forwards["started_at_s"], since_s, side="right"))
    ran = begun > 0 and forwards["started_at_s"][begun - 1] + forwards["seconds"][begun - 1] > since_s
    return forwards[begun - int(ran) :]


def _thinned(forwards: Forwards, each: int) -> Forwards:
    """A record for every `each` forwards, [n] -> [n / each, rounded up]."""
    if each == 1:
        return forwards
    firsts = np.arange(0, len(forwards), each)
    seconds = forwards["seconds"].astype(np.float64)
    gaps = np.append(np.diff(forwards["started_at_s"]) - seconds[:-1], 0.0)[: len(forwards)]
    host_s = np.add.reduceat(np.where((gaps > 0) & (gaps < GAP_S), gaps, 0.0), firsts)
    thinned = np.zeros(len(firsts), dtype=FORWARD)
    thinned["started_at_s"] = forwards["started_at_s"][firsts]
    thinned["seconds"] = np.add.reduceat(seconds, firsts) + np.maximum(host_s - _MAX_HOST_S, 0.0)
    sizes = np.diff(firsts, append=len(forwards))
    for name in _COUNTS:
        thinned[name] = np.rint(np.add.reduceat(forwards[name].astype(np.float64), firsts) / sizes)
    return thinned
