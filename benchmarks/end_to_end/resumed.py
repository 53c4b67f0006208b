"""What a resumed record keeps. Arms of a seed are compared with each other: one machine, one boot, one commit."""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from benchmarks.end_to_end import inputs
from benchmarks.end_to_end.arms import ARMS, COMPARED
from benchmarks.harness.record import Row
from launcher.cluster.node import cpu_model

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> str:
    """CPU model, flags that select kernels, and number of logical CPUs; two machines of one name count as one."""
    model, flags = cpu_model()
    return f"{model} ({' '.join(flags) or 'no flags'}), {os.cpu_count()} CPUs"


def boot() -> str:
    """Identifier of this boot of the machine, shortened."""
    return _BOOT.read_text(encoding="utf-8")[:8] if _BOOT.exists() else "unknown"


def kept(rows: Sequence[Row], arms_of: Callable[[int], Collection[str]], here: Row) -> tuple[list[Row], set[int]]:
    """Rows that stay, and seeds that get no further runs; `here` has the machine, the boot and the commit.

    A seed that ran elsewhere, or with another commit, stays if it has every arm of `arms_of(seed)` but those in INT8,
    which some machines cannot run exactly. It gets no further runs. Any other such seed is measured anew as a whole;
    its runs stay in the record as discarded.
    """
    left, ended = list(rows), set()
    for seed in sorted({int(row["seed"]) for row in rows}):
        runs = [row for row in rows if (row["what"], row["seed"]) == ("run", seed)]
        if not runs or all(_place(row) == _place(here) for row in runs):
            continue
        done = {row["arm"] for row in runs}
        missing = [arm for arm in arms_of(seed) if arm not in done]
        if all(ARMS[arm].keys.get("engine.format") == "int8" for arm in missing):
            ended.add(seed)
            print(f"seed {seed} is whole and gets no further runs", flush=True)
        else:
            left = [row for row in left if row["seed"] != seed or row["what"] == "discarded"]
            left += [discarded(row, "the seed was measured anew as a whole") for row in runs]
            print(f"seed {seed} began elsewhere or with another commit; it is measured anew", flush=True)
    return left, ended


def discarded(run: Row, why: str) -> Row:
    """A run that counts for nothing, with its seconds if it ended."""
    names = ("seed", "arm", "seconds", "step_s", "machine", "boot", "commit", "dirty")
    return {"what": "discarded", **{name: run[name] for name in names if name in run}, "why": why}


def absent(rows: Sequence[Row], left_out: Collection[str]) -> list[str]:
    """Runs of a whole record that `rows` do not have, a line for each arm; without arms that are `left_out`."""
    done = {(row["arm"], row["seed"]) for row in rows if row["what"] == "run"}
    lines = []
    for arm in ARMS:
        seeds = inputs.SEEDS + (inputs.MORE_SEEDS if arm in COMPARED else ())
        missing = [str(seed) for seed in seeds if (arm, seed) not in done]
        if missing and arm not in left_out:
            lines.append(f"{arm}: {'seed' if len(missing) == 1 else 'seeds'} {', '.join(missing)}")
    return lines


def _place(row: Row) -> tuple[object, ...]:
    return row["machine"], row["boot"], row["commit"]
