"""The balancing of verl 0.9.1 (Karmarkar-Karp), called as verl's trainer and engines call it.

`python -m benchmarks.packing.verl --build build/verl` downloads the wheel and extracts the balancing module
`verl/utils/seqlen_balancing.py` into that directory; nothing is installed. The module imports three others of its
package for moving tensors between ranks. Empty modules replace them, since the functions called here do not use them.
Needs torch, and the network or a pip configuration that replaces it.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

VERSION = "0.9.1"
DIRECTORY = Path("build/verl")
_FILE = "verl/utils/seqlen_balancing.py"
_ABSENT = {
    "verl": (),
    "verl.protocol": ("DataProto",),
    "verl.utils": ("tensordict_utils",),
    "verl.utils.tensordict_utils": (),
    "verl.utils.device": ("get_device_name",),
}
"""Modules that the file imports, with the names that it imports from them."""

Bins = list[list[int]]


class Balancing(Protocol):
    """The used part of the module."""

    def get_seqlen_balanced_partitions(self, seqlen_list: list[int], k_partitions: int, equal_size: bool) -> Bins:
        """Indices in `k_partitions` parts of nearly equal sums."""

    def ceildiv(self, a: int, b: int) -> int:
        """The quotient, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An assignment of samples, and the time to compute it."""

    ranks: list[Bins]
    """[rank][micro batch] indices of samples."""
    seconds: float
    """Seconds until every rank knows its micro batches. Ranks plan in parallel and agree on the number of micro batches
    after each attempt, so each attempt counts with its slowest rank."""
    total_seconds: float
    """Seconds of all ranks added up."""


def build(directory: Path) -> None:
    """Download the wheel and extract the module into `directory`."""
    with tempfile.TemporaryDirectory() as name:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "download", f"verl=={VERSION}", "--no-deps", f"--dest={name}"], check=True)
        directory.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(next(Path(name).glob("verl-*.whl"))) as wheel:
            (directory / Path(_FILE).name).write_bytes(wheel.read(_FILE))


def load(directory: Path) -> Balancing | None:
    """The module that `build` extracted; None if there is none."""
    path = directory / Path(_FILE).name
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("verl_seqlen_balancing", path)
    assert spec is not None and spec.loader is not None
    absent = {name: ModuleType(name) for name in _ABSENT if name not in sys.modules}
    for name, module in absent.items():
        for attribute in _ABSENT[name]:
            setattr(module, attribute, ModuleType(attribute))
    sys.modules.update(absent)
    try:
        balancing = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(balancing)
    finally:
        for name in absent:
            del sys.modules[name]
    module_of_verl: Balancing = balancing  # type: ignore[assignment]
    return module_of_verl


def workloads(lengths: Sequence[int]) -> list[int]:
    """Costs by verl's `calculate_workload`; the linear and the quadratic part are equal at 24,576 tokens."""
    return [24_576 * length + length**2 for length in lengths]


def plan_ranks(module: Balancing, lengths: Sequence[int], *, num_ranks: int, equal_size: bool) -> Planned:
    """Assign samples to ranks, one micro batch each; with `equal_size`, as in verl's trainer, equally many per rank."""
    started = time.perf_counter()
    parts = module.get_seqlen_balanced_partitions(workloads(lengths), num_ranks, equal_size)
    seconds = time.perf_counter() - started
    return Planned(ranks=[[part] for part in parts], seconds=seconds, total_seconds=seconds)


def plan_micro_batches(module: Balancing, lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> Planned:
    """Assign samples to ranks, equally many to each, then each rank's samples to micro batches.

    Follows `rearrange_micro_batches` with a process group. It starts with the largest number of micro batches that any
    rank needs by its tokens. Karmarkar-Karp ignores the token bound, so the number grows until all ranks keep it.
    """
    by_rank = plan_ranks(module, lengths, num_ranks=num_ranks, equal_size=True)
    shares = [[lengths[i] for i in parts[0]] for parts in by_rank.ranks]
    costs = [workloads(share) for share in shares]
    count = max(min(len(share), module.ceildiv(sum(share), max_tokens)) for share in shares)
    seconds, total_seconds = by_rank.seconds, by_rank.total_seconds
    while True:
        micro_batches, times = [], []
        for cost in costs:
            started = time.perf_counter()
            micro_batches.append(module.get_seqlen_balanced_partitions(cost, count, False))
            times.append(time.perf_counter() - started)
        seconds, total_seconds = seconds + max(times), total_seconds + sum(times)
        if all(_is_within(bins, share, max_tokens) for bins, share in zip(micro_batches, shares, strict=True)):
            break
        count += 1
    ranks = [
        [[parts[0][i] for i in micro_batch] for micro_batch in bins]
        for bins, parts in zip(micro_batches, by_rank.ranks, strict=True)
    ]
    return Planned(ranks=ranks, seconds=seconds, total_seconds=total_seconds)


def _is_within(bins: Bins, lengths: Sequence[int], max_tokens: int) -> bool:
    return all(sum(lengths[i] for i in micro_batch) <= max_tokens for micro_batch in bins)


def main(argv: Sequence[str] | None = None) -> int:
    """Download the module."""
    parser = argparse.ArgumentParser(description=f"Download the balancing module of verl {VERSION}.")
    parser.add_argument("--build", type=Path, default=DIRECTORY)
    options = parser.parse_args(argv)
    build(options.build)
    print(f"{options.build}: {'there' if load(options.build) else 'not there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
