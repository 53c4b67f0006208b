"""verl 0.9.1's balancing (Karmarkar-Karp), driven as its trainer and its engines drive it.

`python -m benchmarks.packing.verl --build build/verl` downloads the wheel and puts the one module that balances,
`verl/utils/seqlen_balancing.py`, there; nothing is installed. The module imports three others of its package for what
moves tensors between ranks; they are stood in for by empty ones, because nothing that is called here touches them.
Needs the network, or a pip configuration that replaces it, and torch.
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
"""Modules that the file imports, and the names it takes from them."""

Bins = list[list[int]]


class Balancing(Protocol):
    """What is used of the module."""

    def get_seqlen_balanced_partitions(self, seqlen_list: list[int], k_partitions: int, equal_size: bool) -> Bins:
        """Indices in `k_partitions` parts of nearly equal sums."""

    def ceildiv(self, a: int, b: int) -> int:
        """Rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What verl makes of a step, and what it costs."""

    ranks: list[Bins]
    """[rank][micro batch] indices of samples."""
    seconds: float
    """Until every rank knows its micro batches: ranks plan their own side by side, and agree on the number after each
    attempt, so each attempt counts with its slowest rank."""
    total_seconds: float
    """Of all ranks, one after another."""


def build(directory: Path) -> None:
    """Download the wheel and leave the module in `directory`."""
    with tempfile.TemporaryDirectory() as name:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "download", f"verl=={VERSION}", "--no-deps", f"--dest={name}"], check=True)
        directory.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(next(Path(name).glob("verl-*.whl"))) as wheel:
            (directory / Path(_FILE).name).write_bytes(wheel.read(_FILE))


def load(directory: Path) -> Balancing | None:
    """The module that was put there, or None."""
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
    found: Balancing = balancing  # type: ignore[assignment]
    return found


def workloads(lengths: Sequence[int]) -> list[int]:
    """Cost of samples by verl's own coefficients (`calculate_workload`): parity at 24,576 tokens."""
    return [24_576 * length + length**2 for length in lengths]


def plan_ranks(module: Balancing, lengths: Sequence[int], *, num_ranks: int, equal_size: bool) -> Planned:
    """Samples to ranks, one micro batch each; with `equal_size`, as its trainer does, equally many to each."""
    started = time.perf_counter()
    parts = module.get_seqlen_balanced_partitions(workloads(lengths), num_ranks, equal_size)
    seconds = time.perf_counter() - started
    return Planned(ranks=[[part] for part in parts], seconds=seconds, total_seconds=seconds)


def plan_micro_batches(module: Balancing, lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> Planned:
    """Samples to ranks, equally many to each, then each rank's to micro batches.

    As `rearrange_micro_batches` with a process group: the most that any rank needs by its tokens, and more until
    Karmarkar-Karp, which does not know the bound, keeps it on every rank.
    """
    by_rank = plan_ranks(module, lengths, num_ranks=num_ranks, equal_size=True)
    shares = [[lengths[i] for i in parts[0]] for parts in by_rank.ranks]
    costs = [workloads(share) for share in shares]
    count = max(min(len(share), module.ceildiv(sum(share), max_tokens)) for share in shares)
    seconds, total_seconds = by_rank.seconds, by_rank.total_seconds
    while True:
        found, times = [], []
        for cost in costs:
            started = time.perf_counter()
            found.append(module.get_seqlen_balanced_partitions(cost, count, False))
            times.append(time.perf_counter() - started)
        seconds, total_seconds = seconds + max(times), total_seconds + sum(times)
        if all(_is_within(bins, share, max_tokens) for bins, share in zip(found, shares, strict=True)):
            break
        count += 1
    ranks = [[[parts[0][i] for i in one] for one in bins] for bins, parts in zip(found, by_rank.ranks, strict=True)]
    return Planned(ranks=ranks, seconds=seconds, total_seconds=total_seconds)


def _is_within(bins: Bins, lengths: Sequence[int], max_tokens: int) -> bool:
    return all(sum(lengths[i] for i in one) <= max_tokens for one in bins)


def main(argv: Sequence[str] | None = None) -> int:
    """Download it."""
    parser = argparse.ArgumentParser(description=f"Download the balancing module of verl {VERSION}.")
    parser.add_argument("--build", type=Path, default=DIRECTORY)
    options = parser.parse_args(argv)
    build(options.build)
    print(f"{options.build}: {'there' if load(options.build) else 'not there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
