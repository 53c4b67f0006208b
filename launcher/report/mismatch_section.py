"""Charts of the gap between sampler and trainer by cause, and of what the guard did about it."""

import numpy as np

from launcher.report.charts import Line, line_chart, stacked_chart
from launcher.report.html import grid, section
from launcher.report.metric_table import MetricTable

K3_PARTS, SIZES = "rollout_corr/part_k3/", "rollout_corr/part_ess/"
"""Prefixes of the metrics that split k3 and the effective sample size by cause."""
_CAUSES = ("quantisation", "numerics", "stale_", "speculation", "interaction")


def mismatch_section(metrics: MetricTable) -> str:
    """The section; empty for a run without a sample and without a guard."""
    charts = [
        ("k3 by cause", "of a sample of the step's tokens; parts below 0 are left out", _stack(metrics)),
        ("Effective sample size by cause", "share", _lines(metrics, SIZES)),
        ("Level of the guard", "0: as configured", _lines(metrics, "guard/level")),
    ]
    return section("Mismatch by cause", grid(charts)) if any(chart for *_, chart in charts) else ""


def _stack(metrics: MetricTable) -> str:
    """Areas of the causes. By chance a part may be below 0, which no area can show."""
    steps = metrics.filled("step") + 1
    areas = []
    for cause in _CAUSES:
        for name in metrics.names(K3_PARTS + cause):
            values = np.maximum(metrics.filled(name), 0.0)
            if values.any():
                areas.append(Line(label=name.removeprefix(K3_PARTS), at=steps, values=values, hint=name))
    return stacked_chart(areas)


def _lines(metrics: MetricTable, prefix: str) -> str:
    lines = []
    for name in metrics.names(prefix):
        numbers, values = metrics.column(name)
        label = name.removeprefix(prefix) or "level"
        lines.append(Line(label=label, at=metrics.filled("step")[numbers] + 1, values=values, hint=name))
    return line_chart(lines)
