"""The rows of `metrics.jsonl` as columns: a run of 10,000 steps has millions of values.

Rows with the same names are kept as one block of numbers, so that a column is read at the speed of memory.

Invariants: a column holds what was recorded, in the order of the rows, and nothing for rows without it.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from launcher.run_dir.atomic_files import iterate_lines

_MOST_STEPS = 1 << 53
"""Up to which each step has a number of its own in the table."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows with the same names."""

    numbers: Ints
    """[R] numbers of the rows, rising."""
    index: Mapping[str, int]
    """Column of each name."""
    values: Floats
    """[R, names]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTable:
    """All rows of a run; `step` counts from 0, and `time_s` is the wall clock at the end of a step."""

    num_rows: int
    blocks: Sequence[Block]
    num_damaged: int = 0
    """Lines that were left out."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, object] | None]) -> Self:
        """The table of rows; values that are not numbers are left out. None is a damaged line."""
        numbers: dict[tuple[str, ...], list[int]] = {}
        values: dict[tuple[str, ...], array[float]] = {}
        count = num_damaged = 0
        for row in rows:
            if row is None:
                num_damaged += 1
                continue
            names, figures = _numbers(row)
            numbers.setdefault(names, []).append(count)
            values.setdefault(names, array("d")).extend(figures)
            count += 1
        blocks = [
            Block(
                numbers=np.array(of_names, dtype=np.int64),
                index={name: column for column, name in enumerate(names)},
                values=np.frombuffer(values[names]).reshape(len(of_names), len(names)),
            )
            for names, of_names in numbers.items()
            if names
        ]
        return cls(num_rows=count, blocks=blocks, num_damaged=num_damaged)

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """The table of a run directory; without rows if it has no metrics. A row without a step is damaged."""
        rows = (line.row for line in iterate_lines(run_dir / "metrics.jsonl"))
        return cls.of(row if row is not None and _is_step(row.get("step")) else None for row in rows)

    def column(self, name: str) -> tuple[Ints, Floats]:
        """Numbers of the rows that hold a metric, and its values."""
        found = [block for block in self.blocks if name in block.index]
        if not found:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        numbers = np.concatenate([block.numbers for block in found])
        values = np.concatenate([block.values[:, block.index[name]] for block in found])
        order = np.argsort(numbers, kind="stable")
        return numbers[order], values[order]

    def values(self, name: str) -> Floats:
        """What was recorded of a metric."""
        return self.column(name)[1]

    def filled(self, name: str, default: float = 0.0) -> Floats:
        """A value for each row, [num_rows]."""
        filled = np.full(self.num_rows, default)
        numbers, values = self.column(name)
        filled[numbers] = values
        return filled

    def seconds(self) -> Floats:
        """Seconds from the row before to each row, with evaluation and checkpoint, [num_rows].

        Time between two starts is no part of them. Where a row lacks `timeline/elapsed_s` (the wall clock was set
        back), they are those of its step alone.
        """
        seconds = self.filled("timing_s/step")
        numbers, elapsed_s = self.column("timeline/elapsed_s")
        seconds[numbers] = elapsed_s
        return seconds

    def names(self, prefix: str) -> list[str]:
        """Metrics of any row whose names begin with `prefix`, sorted."""
        return sorted({name for block in self.blocks for name in block.index if name.startswith(prefix)})

    def last_row(self) -> dict[str, float]:
        """The last row."""
        for block in self.blocks:
            if block.numbers[-1] == self.num_rows - 1:
                return {name: float(block.values[-1, column]) for name, column in block.index.items()}
        return {}


def _is_step(value: object) -> bool:
    return type(value) is int and value < _MOST_STEPS


def _numbers(row: Mapping[str, object]) -> tuple[tuple[str, ...], "array[float]"]:
    try:
        return tuple(row), array("d", row.values())  # type: ignore[arg-type]
    except TypeError:
        kept = {name: value for name, value in row.items() if isinstance(value, int | float)}
        return tuple(kept), array("d", kept.values())
