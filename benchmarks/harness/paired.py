"""Differences between two ways of running, where each seed was run both ways."""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from benchmarks.harness.record_file import Goal, Row

_STUDENT_95 = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Two-sided 95 % quantiles of Student's distribution by degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean difference over seeds, with its standard error."""

    mean: float
    standard_error: float
    student_95: float
    """Half width of the 95 % confidence interval, in standard errors."""

    @classmethod
    def of(cls, gaps: Sequence[float]) -> Self:
        """From one difference per seed, for 2 to 10 seeds."""
        return cls(
            mean=statistics.fmean(gaps),
            standard_error=statistics.stdev(gaps) / math.sqrt(len(gaps)),
            student_95=_STUDENT_95[len(gaps) - 1],
        )

    @classmethod
    def between(cls, first: Mapping[int, float], second: Mapping[int, float]) -> Self:
        """Of `first` minus `second`, over the seeds that both have."""
        return cls.of([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean."""
        half = self.student_95 * self.standard_error
        return self.mean - half, self.mean + half


def by_seed(rows: Sequence[Row], field: str, **wanted: str | int) -> dict[int, float]:
    """The field of the rows with these values, by their seed."""
    return {
        int(row["seed"]): float(row[field])
        for row in rows
        if field in row and "seed" in row and all(row.get(key) == value for key, value in wanted.items())
    }


def goal_in_points(
    name: str, difference: Difference, *, bound: float, direction: Literal["at least", "at most"], scale: float = 100.0
) -> Goal:
    """Goal of a difference, times `scale` in points: the worse end of its interval counts."""
    low, high = difference.interval
    end, value = ("lower", scale * low) if direction == "at least" else ("upper", scale * high)
    return Goal(name=f"{name}, {end} end over seeds", value=value, bound=bound, direction=direction, unit="points")


def check_seeds(parser: argparse.ArgumentParser, number: int) -> None:
    """End with an error if the number of seeds allows no difference."""
    most = len(_STUDENT_95) + 1
    if not 2 <= number <= most:
        parser.error(f"--seeds {number}: differences need 2 to {most} seeds")
