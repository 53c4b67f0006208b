"""The dashboard of one or several runs as one page, and the comparison of several runs.

Charts come from `launcher.metrics.panels`; a panel without records is left out. With several runs a chart has a line
for each run and shows the first metric of its panel. The page holds no script and names no address.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher.metrics.panels import DASHBOARD, Panel
from launcher.metrics.registry import find
from launcher.report.html import grid, page, section, table
from launcher.report.svg import Line, line_chart
from launcher.run_dir.atomic_files import read_rows, replace_text

CAUSES = ("underfilled", "tail_wait", "publish", "trainer_wait", "checkpoint", "gap", "other")
"""Causes of the bubble (`rollout.tracing.timeline.Part`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Metrics and configuration of a run directory."""

    name: str
    rows: Sequence[Mapping[str, float]]
    settings: Mapping[str, str]
    """Dotted keys of `config.yaml`, values as JSON."""

    def line(self, metric: str, *, label: str, over_hours: bool) -> Line:
        """The recorded values of a metric, over steps (from 1) or hours since the first step began."""
        rows = [row for row in self.rows if metric in row]
        start_s = self.rows[0]["time_s"] - self.rows[0].get("timing_s/step", 0.0) if over_hours else 0.0
        at = [(row["time_s"] - start_s) / 3600 if over_hours else row["step"] + 1 for row in rows]
        return Line(label=label, at=at, values=[row[metric] for row in rows])


def read_runs(run_dirs: Sequence[Path]) -> list[RecordedRun]:
    """Metrics and configuration of each directory.

    Raises:
        FileNotFoundError: a directory holds no metrics.
    """
    names = _distinct([run_dir.resolve() for run_dir in run_dirs])
    return [_read(run_dir, name) for run_dir, name in zip(run_dirs, names, strict=True)]


def _distinct(paths: Sequence[Path]) -> list[str]:
    """Directory names; whole paths where two names are equal."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _read(run_dir: Path, name: str) -> RecordedRun:
    rows = [
        {key: value for key, value in row.items() if isinstance(value, int | float)}
        for row in read_rows(run_dir / "metrics.jsonl")
    ]
    if not rows:
        raise FileNotFoundError(f"{run_dir} holds no metrics; name the run directory of a run that has finished a step")
    config = run_dir / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    return RecordedRun(name=name, rows=rows, settings=dict(_flat(yaml.safe_load(text) or {}, "")))


def _flat(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(value)


def write_dashboard(run_dirs: Sequence[Path], target: Path) -> Path:
    """Write the panels of all runs over steps; returns `target`."""
    runs = read_runs(run_dirs)
    body = "".join(_sections(runs, over_hours=False))
    replace_text(target, page(title="Dashboard", subtitle=_subtitle(runs), body=body))
    return target


def write_comparison(run_dirs: Sequence[Path], target: Path) -> Path:
    """Write differences in configuration, bubble by cause, and panels over steps and over hours; returns `target`."""
    runs = read_runs(run_dirs)
    body = [
        section("Differences in configuration", _differences(runs)),
        section("Bubble by cause, hours of the mean engine", _bubble_hours(runs)),
        *_sections(runs, over_hours=False),
        *_sections(runs, over_hours=True),
    ]
    replace_text(target, page(title="Comparison of runs", subtitle=_subtitle(runs), body="".join(body)))
    return target


def _subtitle(runs: Sequence[RecordedRun]) -> str:
    return " · ".join(f"{run.name}: {len(run.rows)} steps" for run in runs)


def _sections(runs: Sequence[RecordedRun], *, over_hours: bool) -> Iterator[str]:
    suffix = ", over hours" if over_hours else ""
    for title, panels in DASHBOARD.items():
        charts = [(_caption(panel), _chart(runs, panel, over_hours=over_hours)) for panel in panels]
        if any(chart for _, chart in charts):
            yield section(title + suffix, grid(charts))


def _caption(panel: Panel) -> str:
    metric = find(panel.metrics[0])
    unit = metric.unit.replace("`", "") if metric is not None else ""
    return f"{panel.title}, {unit}" if unit and unit != panel.title.lower() else panel.title


def _chart(runs: Sequence[RecordedRun], panel: Panel, *, over_hours: bool) -> str:
    if len(runs) == 1:
        lines = [runs[0].line(metric, label=metric, over_hours=over_hours) for metric in panel.metrics]
    else:
        lines = [run.line(panel.metrics[0], label=run.name, over_hours=over_hours) for run in runs]
    return line_chart(lines, log=panel.log)


def _differences(runs: Sequence[RecordedRun]) -> str:
    keys = sorted({key for run in runs for key in run.settings})
    rows = [
        [key, *values] for key in keys if len(set(values := [run.settings.get(key, "not set") for run in runs])) > 1
    ]
    return table(["key", *(run.name for run in runs)], rows, numbers_from=1) if rows else "<p>There are none.</p>"


def _bubble_hours(runs: Sequence[RecordedRun]) -> str:
    """Share of the time in each cause times the time, summed over steps."""
    rows = [[cause.replace("_", " "), *(f"{_hours(run, cause):.3f}" for run in runs)] for cause in CAUSES]
    elapsed = [
        "all time",
        *(f"{sum(row.get('timeline/elapsed_s', 0.0) for row in run.rows) / 3600:.3f}" for run in runs),
    ]
    return table(["cause", *(run.name for run in runs)], [*rows, elapsed], numbers_from=1)


def _hours(run: RecordedRun, cause: str) -> float:
    name = f"timeline/{cause}_share"
    return sum(row.get(name, 0.0) * row.get("timeline/elapsed_s", 0.0) for row in run.rows) / 3600
