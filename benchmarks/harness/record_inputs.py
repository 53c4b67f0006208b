"""Inputs of benchmarks that are not committed, each with the committed command that makes it."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.record_file import UNRECORDED, Input

_FILE = "inputs.json"
"""File in the directory of a recorded run: the run as an input, and the inputs of the run."""


def shown_path(path: Path) -> str:
    """A path relative to the working directory; only the name if the path lies elsewhere."""
    if not path.is_absolute():
        return str(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def quickstart_inputs(work: Path | None) -> tuple[Input, ...]:
    """The work directory of a quickstart as an input; none if the benchmark makes its own warm start."""
    if work is None:
        return ()
    seed = _seed(work / "run" / "config.yaml")
    command = f"python -m examples.arithmetic.quickstart --work {shown_path(work)}"
    return (Input(path=shown_path(work), command=command if seed is None else f"{command} --seed {seed}"),)


def arctic_inputs(directory: Path) -> tuple[Input, ...]:
    """The build directory of Arctic's suffix trees as an input."""
    command = f"python -m benchmarks.drafting.baselines.arctic --build {shown_path(directory)}"
    return (Input(path=shown_path(directory), command=command),)


def run_inputs(path: Path) -> tuple[Input, ...]:
    """A run directory, or a folder in one, as an input; without `inputs.json` its command is `UNRECORDED`."""
    for folder in (path, path.parent):
        if (folder / _FILE).is_file():
            return tuple(Input(**item) for item in json.loads((folder / _FILE).read_text(encoding="utf-8")))
    return (Input(path=shown_path(path), command=UNRECORDED),)


def write_inputs(run_dir: Path, inputs: Sequence[Input]) -> None:
    """Write `inputs.json` into a run directory, for `run_inputs`."""
    (run_dir / _FILE).write_text(json.dumps([asdict(item) for item in inputs], indent=1) + "\n", encoding="utf-8")


def _seed(config: Path) -> int | None:
    """Seed of a saved configuration; None if there is none."""
    seed = re.search(r"^seed: (\d+)$", config.read_text(encoding="utf-8"), re.MULTILINE) if config.is_file() else None
    return int(seed[1]) if seed else None
