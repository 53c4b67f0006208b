"""The dashboard of one or several runs as one page, and the comparison of several runs.

Charts come from `launcher.metrics.panels`; a panel without records is left out. With several runs a chart has a line
for each run and shows the first metric of its panel. The page holds no script and names no address.
"""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.metrics.panels import DASHBOARD, Panel
from launcher.metrics.registry import find
from launcher.report.charts import Line, line_chart, note, stacked_chart
from launcher.report.html import grid, page, section, table
from launcher.report.lanes import PART_LABELS
from launcher.report.metric_table import Floats, Ints, MetricTable
from launcher.report.reading import RecordReader
from launcher.report.run_timeline import START_S
from launcher.run_dir.atomic_files import left_out, replace_text
from rollout.tracing.timeline import Part

CAUSES = tuple(part for part in Part if part is not Part.SATURATED)
"""Causes of the bubble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Metrics and configuration of a run directory."""

    name: str
    table: MetricTable
    hours: Floats
    """Hours of work at the end of each row's step: steps, evaluations and checkpoints since the first step began."""
    paused_h: float
    """Hours between the first step and the last that are in no row: between two starts, and of steps that a resume took
    again."""
    settings: Mapping[str, str]
    """Dotted keys of `config.yaml`, values as JSON."""
    starts: Ints
    """[rows] number of the start that recorded each row; equal numbers where earlier versions noted no times."""
    notes: Sequence[str] = ()
    """Sentences about damaged records that are left out."""

    def line(self, metric: str, *, label: str, over_hours: bool) -> Line:
        """The recorded values of a metric, over steps (from 1) or hours."""
        rows, values = self.table.column(metric)
        at = self._at(rows, over_hours=over_hours)
        return Line(label=label, at=at, values=values, shown=_total(metric, values, self.starts[rows]), hint=metric)

    def parts(self, metrics: Sequence[str], *, over_hours: bool) -> list[Line]:
        """Parts of a whole over the rows that hold any of them; a part that a row lacks is 0 there.

        A metric that no row holds is left out.
        """
        found = {metric: rows for metric in metrics if len(rows := self.table.column(metric)[0])}
        if not found:
            return []
        rows = np.unique(np.concatenate(list(found.values())))
        at = self._at(rows, over_hours=over_hours)
        return [
            Line(label=_short(metric), at=at, values=self.table.filled(metric)[rows], hint=metric) for metric in found
        ]

    def _at(self, rows: Ints, *, over_hours: bool) -> Floats:
        """Where rows stand on the axis."""
        return (self.hours if over_hours else self.table.filled("step") + 1)[rows]


def _total(metric: str, values: Floats, starts: Ints) -> str | None:
    """What a legend shows of a count that is 0 in a healthy run: all of the run, over all its starts."""
    entry = find(metric)
    if entry is None or entry.healthy != "0":
        return None
    if entry.reduction == "total":
        rises = np.diff(values, prepend=0.0)
        # a start counts from 0 again, so a fall is a new start, too: the guard's, and those without a time
        is_new = (np.diff(starts, prepend=0) > 0) | (rises < 0)
        return f"{np.where(is_new, values, rises).sum():.0f} in all"
    is_per_step = entry.reduction == "sum" or entry.reduction.startswith("sum over ")
    return f"{values.sum():.0f} in all" if is_per_step else None


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
    table = MetricTable.read(run_dir)
    if not table.num_rows:
        raise FileNotFoundError(f"{run_dir} holds no metrics; name the run directory of a run that has finished a step")
    reader = RecordReader(run_dir)
    _, settings = reader.config()
    seconds = table.seconds()
    pauses_s = np.diff(table.filled("time_s")) - seconds[1:]
    return RecordedRun(
        name=name,
        table=table,
        hours=seconds.cumsum() / 3600,
        paused_h=float(pauses_s[pauses_s > START_S].sum()) / 3600,
        settings=dict(_flat(settings, "")),
        starts=_starts(reader.environment(), table.filled("time_s")),
        notes=[*left_out(run_dir / "metrics.jsonl", table.num_damaged), *reader.notes],
    )


def _starts(newest: Mapping[str, object], ended_s: Floats) -> Ints:
    """Number of the start that recorded each row, from the times at which the rows ended."""
    earlier = newest.get("earlier")
    found = [each for each in (*(earlier if isinstance(earlier, list) else ()), newest) if isinstance(each, Mapping)]
    begun_s = [begun for each in found if isinstance(begun := each.get("time_s"), int | float)]
    return np.maximum.accumulate(np.searchsorted(np.sort(np.array(begun_s, dtype=np.float64)), ended_s))


def _flat(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(value, default=str)


def write_dashboard(run_dirs: Sequence[Path], target: Path) -> Path:
    """Write the panels of all runs over steps; returns `target`."""
    runs = read_runs(run_dirs)
    body = "".join(_sections(runs, ((False, ""),)))
    replace_text(target, page(title="Dashboard", subtitle=_subtitle(runs), body=_note(runs) + body))
    return target


def write_comparison(run_dirs: Sequence[Path], target: Path) -> Path:
    """Write differences in configuration, bubble by cause, and panels over steps and over hours; returns `target`."""
    runs = read_runs(run_dirs)
    body = [
        section("Differences in configuration", _differences(runs)),
        section("Bubble by cause, hours of the mean engine", _bubble_hours(runs)),
        *_sections(runs, ((False, " over steps"), (True, " over hours"))),
    ]
    replace_text(target, page(title="Comparison of runs", subtitle=_subtitle(runs), body=_note(runs) + "".join(body)))
    return target


def _subtitle(runs: Sequence[RecordedRun]) -> str:
    return " · ".join(f"{run.name}: {run.table.num_rows} steps, {run.hours[-1]:.1f} h" for run in runs)


def _note(runs: Sequence[RecordedRun]) -> str:
    """What a reader of the charts must know."""
    pauses = ", ".join(f"{html.escape(run.name)} {run.paused_h:.1f} h" for run in runs if run.paused_h >= 0.05)
    paused = (
        '<p class="note">Hours are those of steps, evaluations and checkpoints. Pauses and start-ups between them, and '
        f"steps that were taken again, are left out: {pauses}.</p>"
    )
    damaged = [html.escape(f"{run.name}: {text}.") for run in runs for text in run.notes]
    return "".join(
        [
            note(max(run.table.num_rows for run in runs)),
            paused if pauses else "",
            *(f'<p class="note">{text}</p>' for text in damaged),
        ]
    )


def _sections(runs: Sequence[RecordedRun], ways: Sequence[tuple[bool, str]]) -> Iterator[str]:
    """A section for each group of panels; `ways` are (over hours, suffix of the title), side by side for each panel."""
    for title, panels in DASHBOARD.items():
        charts = [
            (panel.title + suffix, _unit(panel), _chart(runs, panel, over_hours=over_hours))
            for panel in panels
            for over_hours, suffix in ways
        ]
        if drawn := grid(charts):
            yield section(title, drawn)


def _unit(panel: Panel) -> str:
    """The unit, unless the title says it."""
    metric = find(panel.metrics[0])
    unit = metric.unit.replace("`", "") if metric is not None else ""
    return "" if unit.lower() in panel.title.lower() or unit in ("none", "ratio") else unit


def _chart(runs: Sequence[RecordedRun], panel: Panel, *, over_hours: bool) -> str:
    if panel.stacked and len(runs) == 1:
        return stacked_chart(runs[0].parts(panel.metrics, over_hours=over_hours))
    if len(runs) == 1:
        lines = [runs[0].line(metric, label=_short(metric), over_hours=over_hours) for metric in panel.metrics]
    else:
        lines = [run.line(panel.metrics[0], label=run.name, over_hours=over_hours) for run in runs]
    return line_chart(lines, log=panel.log, over="hours" if over_hours else "step", whole=not over_hours)


def _short(metric: str) -> str:
    """A name without its first part, which all metrics of a panel share."""
    return metric.partition("/")[2]


def _differences(runs: Sequence[RecordedRun]) -> str:
    keys = sorted({key for run in runs for key in run.settings})
    rows = [
        [key, *values] for key in keys if len(set(values := [run.settings.get(key, "not set") for run in runs])) > 1
    ]
    heading = ["key", *(run.name for run in runs)]
    return table(heading, rows, numbers_from=len(heading)) if rows else "<p>There are none.</p>"


def _bubble_hours(runs: Sequence[RecordedRun]) -> str:
    """Share of the time in each cause times the time, summed over steps, and its share of all time."""
    elapsed = [run.table.filled("timeline/elapsed_s").sum().item() / 3600 for run in runs]
    lost = [[_hours(run, cause) for run in runs] for cause in CAUSES]
    rows = [[PART_LABELS[cause], *map(_of_all, hours, elapsed)] for cause, hours in zip(CAUSES, lost, strict=True)]
    rows.append(["bubble", *map(_of_all, map(sum, zip(*lost, strict=True)), elapsed)])
    rows.append(["all time", *(f"{hours:.3f}" for hours in elapsed)])
    return table(["cause", *(run.name for run in runs)], rows, numbers_from=1)


def _of_all(hours: float, elapsed: float) -> str:
    return f"{hours:.3f} ({hours / elapsed:.1%})" if elapsed > 0 else f"{hours:.3f}"


def _hours(run: RecordedRun, cause: Part) -> float:
    shares = run.table.filled(f"timeline/{cause.value}_share")
    return float(shares @ run.table.filled("timeline/elapsed_s")) / 3600
