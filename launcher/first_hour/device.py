"""The first stage: facts of the device, versions of packages, and the rates that plain copies and products reach on it.

`python -m launcher.first_hour.device --json OUT [--device cpu]`. The rates are ceilings for everything that is measured
later. Times are medians, waited for by a synchronisation of the device. With `--device cpu` sizes are small; its rates
show only that the code works.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from launcher.cluster.node import command_output
from launcher.run_dir.atomic_files import replace_text

PACKAGES = (
    *("torch", "triton", "vllm", "flashinfer-python", "flash-attn", "transformer-engine", "megatron-core"),
    *("transformers", "ray"),
)
"""Whose versions belong to a result."""
NUM_TIMES = 7
NUM_WARM = 2
"""Calls before those that are timed."""
FP8_SINCE = (8, 9)
"""Compute capability of the first devices that multiply FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is copied and multiplied."""

    num_bytes: int
    side: int
    """Rows and columns of square matrices."""


ON_GPU = Sizes(num_bytes=1 << 30, side=8192)
ON_CPU = Sizes(num_bytes=1 << 22, side=128)


def facts(device: torch.device) -> dict[str, object]:
    """Name, memory and compute capability."""
    if device.type == "cpu":
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "num_devices": torch.cuda.device_count(),
        "num_multiprocessors": properties.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
    }


def versions() -> dict[str, str]:
    """Versions of Python, of CUDA in torch, of the driver and of `PACKAGES`; empty for what is not there."""
    drivers = command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found = {"python": sys.version.split()[0], "cuda": torch.version.cuda or "", "driver": drivers.partition("\n")[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def rates(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Bytes per second of copies (read once, written once), and operations per second of products."""
    here = torch.empty(sizes.num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    host = torch.empty(sizes.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    found = {
        "copy_bytes_s": sizes.num_bytes / _seconds(device, lambda: there.copy_(here)),
        "host_to_device_bytes_s": sizes.num_bytes / _seconds(device, lambda: here.copy_(host, non_blocking=True)),
        "device_to_host_bytes_s": sizes.num_bytes / _seconds(device, lambda: host.copy_(here, non_blocking=True)),
    }
    operations = 2.0 * sizes.side**3
    for name, multiply in products(device, sizes.side).items():
        found[f"{name}_flops"] = operations / _seconds(device, multiply)
    return found


def products(device: torch.device, side: int) -> dict[str, Callable[[], torch.Tensor]]:
    """A product of square matrices in each format that the device multiplies."""
    a = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    found: dict[str, Callable[[], torch.Tensor]] = {"bf16": lambda: a @ a}
    codes = torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device)
    found["int8"] = lambda: torch._int_mm(codes, codes.t())
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_SINCE:
        fp8, one = a.to(torch.float8_e4m3fn), torch.ones((), device=device)
        found["fp8"] = lambda: torch._scaled_mm(fp8, fp8.t(), one, one, out_dtype=torch.bfloat16)
    return found


def _seconds(device: torch.device, action: Callable[[], object]) -> float:
    """Median duration of an action on the device."""
    times = []
    for _ in range(NUM_WARM + NUM_TIMES):
        _synchronize(device)
        began = time.perf_counter()
        action()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[NUM_WARM:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record; the exit code is 2 if there is no device."""
    parser = argparse.ArgumentParser(prog="python -m launcher.first_hour.device", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device, or its driver does not fit to torch; `nvidia-smi` says more", file=sys.stderr)
        return 2
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    known, installed = facts(device), versions()
    measured = rates(device, ON_CPU if device.type == "cpu" else ON_GPU)
    for name, value in {**installed, **known, **measured}.items():
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}")
    replace_text(options.json, json.dumps({"facts": known, "versions": installed, "rates": measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
