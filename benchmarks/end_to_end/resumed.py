"""What a resumed record keeps: the arms of a seed are compared with each other, so all of them ran on one machine."""

import os
from collections.abc import Callable, Collection, Sequence

from benchmarks.end_to_end.arms import ARMS
from benchmarks.harness.record import Row
from launcher.cluster.node import cpu_model


def machine_name() -> str:
    """CPU model, flags that select kernels, and number of logical CPUs; two machines of one name count as one."""
    model, flags = cpu_model()
    return f"{model} ({' '.join(flags) or 'no flags'}), {os.cpu_count()} CPUs"


def kept(rows: Sequence[Row], arms_of: Callable[[int], Collection[str]], here: str) -> tuple[list[Row], set[int]]:
    """Rows that stay, and seeds that get no further runs on the machine `here`.

    A seed of another machine stays if it has every arm of `arms_of(seed)` but those in INT8, which some machines cannot
    run exactly. It gets no further runs. Any other seed of another machine is measured anew.
    """
    left, ended = list(rows), set()
    for seed in sorted({int(row["seed"]) for row in rows}):
        runs = [row for row in rows if (row["what"], row["seed"]) == ("run", seed)]
        if all(row["machine"] == here for row in runs):
            continue
        done = {row["arm"] for row in runs}
        missing = [arm for arm in arms_of(seed) if arm not in done]
        elsewhere = " and ".join(sorted({str(row["machine"]) for row in runs}))
        if all(ARMS[arm].keys.get("engine.format") == "int8" for arm in missing):
            ended.add(seed)
            print(f"seed {seed} ran on {elsewhere}; it gets no runs on {here}", flush=True)
        else:
            left = [row for row in left if row["seed"] != seed]
            print(f"seed {seed} began on {elsewhere}; it is measured anew on {here}", flush=True)
    return left, ended
