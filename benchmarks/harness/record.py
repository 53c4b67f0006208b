"""Writes the record of a benchmark: flat rows, goals with their bounds, machine, versions and commit.

`python -m benchmarks.record --check` lists rows whose measured code has changed since; with `--strict` the exit code is
1 if there are any. `python -m benchmarks.record --docs` writes `docs/records/`; with `--check` it only compares.
"""

import argparse
import functools
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.harness import record_check, record_pages
from benchmarks.harness.record_file import Goal, Input, Machine, Provenance, Row, read_rows, text
from benchmarks.harness.record_inputs import shown_path
from launcher.cluster.node import cpu_model, gpu_names, package_versions, source_commit

__all__ = ["Goal", "Input", "Row", "arguments", "rows_before", "write"]

_CPU_TIMES = psutil.cpu_times()


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the two options that every benchmark has."""
    measured_code()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, required=True, help="where the record is written")
    parser.add_argument("--quick", action="store_true", help="the same rows, smaller, under a minute")
    return parser


def rows_before(path: Path, *, resume: bool) -> list[Row]:
    """The rows of a record, with their commits, if a benchmark resumes and has written one before; else none."""
    return read_rows(path) if resume and path.exists() else []


def write(
    path: Path,
    *,
    rows: Sequence[Row],
    goals: Sequence[Goal] = (),
    not_measured: Sequence[str] = (),
    inputs: Sequence[Input] = (),
) -> None:
    """Write the record of this process's command line and print its goals, one line each.

    Rows without a commit get the commit of this process; rows of an earlier process keep theirs.
    """
    code = measured_code()
    record = {
        "command": shlex.join(["python", "-m", _module_name(), *map(_without_machine_path, sys.argv[1:])]),
        "commit": code.commit,
        "date": datetime.now(UTC).date().isoformat(),
        "inputs": [asdict(item) for item in inputs],
        "versions": package_versions(),
        "machine": machine(),
        "cpu_share_taken_by_others": stolen_share(),
        "rows": [row if "commit" in row else {**row, **asdict(code)} for row in rows],
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
        "not_measured": list(not_measured),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.partial")  # a benchmark of hours writes often, and may be killed
    part.write_text(text(record), encoding="utf-8")
    part.replace(path)
    for goal in goals:
        verdict = "met" if goal.met else "NOT met"
        print(f"{goal.name}: {goal.value:.4g} {goal.unit} (goal: {goal.direction} {goal.bound:.4g}) {verdict}")


@functools.cache
def measured_code() -> Provenance:
    """The code of this process at the first call, so records written later do not make the tree dirty."""
    commit = source_commit()
    return Provenance(commit=commit.rstrip("+"), dirty=commit.endswith("+") if commit else None)


def stolen_share() -> float:
    """Share of this machine's CPU time since the process started that its host gave to other machines (steal)."""
    now, began = psutil.cpu_times(), _CPU_TIMES
    spent = sum(now) - sum(began)
    return round((getattr(now, "steal", 0.0) - getattr(began, "steal", 0.0)) / spent, 4) if spent > 0 else 0.0


def machine() -> Machine:
    """CPU model, the CPU flags that select kernels, number of logical CPUs, and the GPU."""
    model, flags = cpu_model()
    return {
        "cpu": model,
        "cpu_flags": flags,
        "logical_cpus": os.cpu_count() or 1,
        "python": platform.python_version(),
        "gpu": ", ".join(gpu_names()) or "none",
    }


def _without_machine_path(argument: str) -> str:
    """An argument as recorded, without paths of this machine."""
    option, separator, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    return f"{option}{separator}{shown_path(path)}"


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name


def main(argv: Sequence[str] | None = None) -> int:
    """Check the committed records or write their pages. Exit code 1: pages differ, or rows are listed with --strict."""
    parser = argparse.ArgumentParser(description=main.__doc__, prog="python -m benchmarks.record")
    parser.add_argument("--check", action="store_true", help="list rows whose code has changed; with --docs, pages")
    parser.add_argument("--docs", action="store_true", help="write docs/records/ from benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="with --check: exit code 1 if rows are listed")
    options = parser.parse_args(argv)
    if options.docs:
        return record_pages.run(check=options.check)
    if not options.check:
        parser.error("name --check or --docs")
    return record_check.run(strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
