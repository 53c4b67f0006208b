"""Draws held-out accuracy over seconds since launch, one line an arm, means over the seeds."""

import statistics
from collections.abc import Sequence

from benchmarks.end_to_end.arms import ARMS, BASE, OURS, PLAIN_LOOP, SHARED, TRL
from benchmarks.harness.plots import Series, lines
from benchmarks.harness.record import Row

SHOWN = (OURS, BASE, SHARED, "drafts", "overlap", PLAIN_LOOP, TRL)
"""Arms of the picture; it has a colour for each."""


def accuracy(rows: Sequence[Row]) -> str:
    """The picture as SVG."""
    return lines("end-to-end-accuracy", [series(rows, arm) for arm in _measured(rows)], unit="accuracy", axis="seconds")


def _measured(rows: Sequence[Row]) -> list[str]:
    measured = {row["arm"] for row in rows if row["what"] == "evaluation"}
    return [arm for arm in SHOWN if arm in measured and arm in ARMS]


def series(rows: Sequence[Row], arm: str) -> Series:
    """Mean seconds and mean accuracy of an arm's evaluations, by step."""
    mine = [row for row in rows if row["what"] == "evaluation" and row["arm"] == arm]
    steps = sorted({int(row["step"]) for row in mine})
    by_step = [[row for row in mine if row["step"] == step] for step in steps]
    return Series(
        label=arm,
        steps=[statistics.fmean(float(row["seconds"]) for row in some) for some in by_step],
        values=[statistics.fmean(float(row["accuracy"]) for row in some) for some in by_step],
    )
