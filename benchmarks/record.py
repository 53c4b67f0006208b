"""The one shape of a benchmark's result: flat rows, goals with their bounds, and where they were measured."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from launcher.environment import cpu_model, gpu_names, package_versions, source_commit

Row = Mapping[str, str | int | float | bool]
_CPU_TIMES = psutil.cpu_times()


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
        "command": " ".join(["python", "-m", _module_name(), *map(_without_place, sys.argv[1:])]),
        "commit": source_commit(),
        "versions": package_versions(),
        "machine": machine(),
        "cpu_share_taken_by_others": stolen_share(),
        "rows": list(rows),
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
        "not_measured": list(not_measured),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for goal in goals:
        verdict = "met" if goal.met else "NOT met"
        print(f"{goal.name}: {goal.value:.4g} {goal.unit} (goal: {goal.direction} {goal.bound:.4g}) {verdict}")


def stolen_share() -> float:
    """Share of this machine's CPU time since this process began that its host gave to others (steal)."""
    now, began = psutil.cpu_times(), _CPU_TIMES
    spent = sum(now) - sum(began)
    return round((getattr(now, "steal", 0.0) - getattr(began, "steal", 0.0)) / spent, 4) if spent > 0 else 0.0


def machine() -> dict[str, str | int | list[str]]:
    """CPU model, the flags that choose kernels, cores, and the GPU if there is one."""
    model, flags = cpu_model()
    return {
        "cpu": model,
        "cpu_flags": flags,
        "logical_cpus": os.cpu_count() or 1,
        "python": platform.python_version(),
        "gpu": ", ".join(gpu_names()) or "none",
    }


def _without_place(argument: str) -> str:
    """An argument as it is recorded: paths from here on, and of those elsewhere the name alone."""
    option, separator, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    here = path.is_relative_to(Path.cwd())
    return f"{option}{separator}{path.relative_to(Path.cwd()) if here else path.name}"


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name
