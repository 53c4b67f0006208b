"""Generates `docs/metrics.md` from the registry of metrics.

    python -m launcher.metrics.docs            print the page
    python -m launcher.metrics.docs --write    write docs/metrics.md of this checkout

A test compares the page with the registry, so the two cannot drift apart.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.generated_page import print_or_write
from launcher.metrics.registry import Metric, sections

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

Generated from `launcher/metrics` by `python -m launcher.metrics.docs --write`; edit the rows there, not this page.

Each line of `metrics.jsonl` holds the metrics of one step under these names, and wandb gets the same names. `step`
counts from 0, and `time_s` is the wall clock at the end of the step. An evaluation after n steps is logged in wandb at
step n, and the one after the last step in the row before. *Sum*, *mean* and *max* reduce over the step. *Total* counts
since the engines of the run were started. It begins at 0 again when a run resumes, and when the guard changes weight
formats. *Last* is the value at the end of the step. Shares and ratios have no unit. A part in braces stands for a
number or a name. Metrics of your own reward or loss are recorded unchanged.
"""


def generate() -> str:
    """The page."""
    return "\n".join([HEAD, *(_section(title, metrics) for title, metrics in sections())])


def _section(title: str, metrics: Sequence[Metric]) -> str:
    header = "| metric | unit | reduction | meaning | healthy |\n|---|---|---|---|---|\n"
    rows = (
        f"| `{metric.name}` | {metric.unit} | {metric.reduction} | {metric.meaning} | {metric.healthy} |"
        for metric in metrics
    )
    return f"## {title}\n\n{header}" + "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints or writes the page."""
    return print_or_write("launcher.metrics.docs", PAGE, generate, argv)


if __name__ == "__main__":
    sys.exit(main())
