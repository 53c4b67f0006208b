"""Reads the rows of `metrics.jsonl` for charts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.run_dir.atomic_files import read_rows

Metrics = Sequence[Mapping[str, float]]
"""A row for each step: `step` counts from 0, `time_s` is the wall clock of its end."""
_NUMBERS = {int, float}


def read_metrics(run_dir: Path) -> Metrics:
    """All rows, without values that are not numbers; none if the file does not exist."""
    return [_numbers(row) for row in read_rows(run_dir / "metrics.jsonl")]


def _numbers(row: Mapping[str, object]) -> Mapping[str, float]:
    if set(map(type, row.values())) <= _NUMBERS:  # a row of numbers is not copied: long runs have millions of values
        return row  # type: ignore[return-value]
    return {key: value for key, value in row.items() if isinstance(value, int | float)}
