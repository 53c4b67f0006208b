"""The registry of metrics: every name that a run writes to `metrics.jsonl` and wandb, with its unit and its reduction.

The registry lies in the launcher, because only the launcher sees the metrics of all packages. A test compares it with
the sources of all producers in both directions: a name that is written and not listed fails, and the reverse.
A name with a part in braces is a pattern: `publish/sqnr_db/layer_{layer}`. Metrics of a user's own reward or loss are
not listed; they are recorded unchanged.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from launcher.metrics.engine_metrics import ENGINES
from launcher.metrics.mismatch_metrics import MISMATCH
from launcher.metrics.run_metrics import SECTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, or a pattern of metrics with the same meaning."""

    name: str
    """Parts in braces stand for a number or a name without a slash."""
    unit: str
    reduction: str
    """Over which ranks, engines, tokens or responses of a step."""
    meaning: str
    healthy: str
    """What a healthy run shows; empty where there is no such value."""

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric, or fits the pattern."""
        return _expression(self.name).fullmatch(name) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    literals = re.split(r"\{[a-z]+\}", pattern)
    return re.compile(r"[^/{}]+".join(map(re.escape, literals)))


def sections() -> Iterator[tuple[str, tuple[Metric, ...]]]:
    """Titles and metrics, in the order of the documentation."""
    for title, rows in (*SECTIONS.items(), *ENGINES.items(), *MISMATCH.items()):
        yield (
            title,
            tuple(
                Metric(name=name, unit=unit, reduction=reduction, meaning=meaning, healthy=healthy)
                for name, unit, reduction, meaning, healthy in rows
            ),
        )


METRICS = tuple(metric for _, of_section in sections() for metric in of_section)


def find(name: str) -> Metric | None:
    """The entry of a metric; exact names come before patterns. None for an unknown name."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if metric.matches(name)), None)
