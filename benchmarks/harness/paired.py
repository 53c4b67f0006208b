"""What two ways of running differ by, where each seed was run both ways."""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_STUDENT_95 = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Two-sided 95 % quantiles of Student's distribution by degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean over seeds, with how sure it is."""

    mean: float
    standard_error: float
    student_95: float
    """Standard errors to either side that hold the true mean in 95 % of cases."""

    @classmethod
    def of(cls, gaps: Sequence[float]) -> Self:
        """From one difference a seed; from 2 to 10 of them."""
        return cls(
            mean=statistics.fmean(gaps),
            standard_error=statistics.stdev(gaps) / math.sqrt(len(gaps)),
            student_95=_STUDENT_95[len(gaps) - 1],
        )

    @property
    def interval(self) -> tuple[float, float]:
        """95 %."""
        half = self.student_95 * self.standard_error
        return self.mean - half, self.mean + half


def check_seeds(parser: argparse.ArgumentParser, number: int) -> None:
    """End with an error where `--seeds` allows no difference."""
    most = len(_STUDENT_95) + 1
    if not 2 <= number <= most:
        parser.error(f"--seeds {number}: a difference needs from 2 to {most} of them")
