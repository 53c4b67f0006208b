"""Writes `report.html` into a run directory: one page with the results of a run, which opens without a network.

    megatron-rl report RUN_DIR

It also writes `timeline.json`, for ui.perfetto.dev. It reads the run's records only (`metrics.jsonl`, `events.jsonl`,
`evaluation.jsonl`, `samples/`, `traces/`, `config.yaml`, `environment.json`, `places.json`), so it can run at any time,
also during the run. The page leaves out charts without records.
"""

import argparse
import html
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from history.drafting.stats import SOURCES
from launcher.report.chrome_trace import write_trace
from launcher.report.fleet import fleet_section
from launcher.report.html import grid, page, section, table, tiles
from launcher.report.plots import Series, lines, stacked
from launcher.report.run_timeline import RunTimeline, read_timeline
from launcher.report.timeline_section import last_steps, timeline_section
from launcher.run_dir.atomic_files import read_rows, replace_text
from launcher.run_dir.places import Places, read_places
from rollout.evaluation import Change, EvaluationRow, changes

K3_BOUND = 5e-3
"""Largest healthy gap between sampler and trainer (docs/observability.md)."""
PHASES = ("rollout", "train", "publish", "switch", "evaluate_before_step", "checkpoint_before_step")
PUBLISH_STAGES = ("scales", "pack", "send", "pause", "apply", "probe")
SAMPLES_SHOWN = 3
MAX_STEPS = 400
"""Steps in a chart; of a longer run every second step is drawn, every third, and so on, and the last one."""
Metrics = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Records of a run directory, read once."""

    name: str
    metrics: Metrics
    timeline: RunTimeline
    places: Places | None
    """Nodes of engines and trainer ranks; None if the run did not record them."""
    evaluation: Sequence[EvaluationRow]
    samples: Mapping[int, Sequence[Mapping[str, object]]]
    """Rows of the first and the last step, by step."""
    config_text: str
    environment: Mapping[str, object]


def read_record(run_dir: Path) -> Record:
    """The records of `run_dir`; raises `FileNotFoundError` if it holds no metrics."""
    if not (run_dir / "metrics.jsonl").exists():
        raise FileNotFoundError(
            f"{run_dir} holds no metrics.jsonl; name the run directory of a run that has finished a step"
        )
    numbered = sorted((int(path.stem.rpartition("-")[2]), path) for path in (run_dir / "samples").glob("step-*.jsonl"))
    environment = run_dir / "environment.json"
    config = run_dir / "config.yaml"
    metrics = [_numbers(row) for row in read_rows(run_dir / "metrics.jsonl")]
    return Record(
        name=run_dir.resolve().name,
        metrics=metrics,
        timeline=read_timeline(run_dir, metrics),
        places=read_places(run_dir),
        evaluation=[EvaluationRow.from_row(row) for row in read_rows(run_dir / "evaluation.jsonl")],
        samples={step: read_rows(path) for step, path in [*numbered[:1], *numbered[1:][-1:]]},
        config_text=config.read_text(encoding="utf-8") if config.exists() else "",
        environment=json.loads(environment.read_text(encoding="utf-8")) if environment.exists() else {},
    )


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` and `timeline.json`; returns the path of the report.

    Raises `FileNotFoundError` if the directory holds no metrics.
    """
    record = read_record(run_dir)
    shown = thinned(record.metrics)
    target = run_dir / "report.html"
    body = "".join(
        (
            _summary(record),
            _evaluation(record),
            _charts(shown),
            timeline_section(record.timeline, shown),
            fleet_section(record.timeline, record.places, last_steps(record.timeline.steps)),
            _drafts(shown),
            _publishing(shown),
            _samples(record),
            _settings(record),
        )
    )
    write_trace(run_dir, record.timeline)
    replace_text(target, page(title=record.name, subtitle=_subtitle(record), body=body))
    return target


def thinned(metrics: Metrics) -> Metrics:
    """Evenly spaced rows and the last one, about `MAX_STEPS` at most."""
    every = -(-len(metrics) // MAX_STEPS)
    return [*metrics[:-1:every], *metrics[-1:]] if every > 1 else metrics


def _numbers(row: Mapping[str, object]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


def _subtitle(record: Record) -> str:
    settings = yaml.safe_load(record.config_text) if record.config_text else {}
    parts = [f"{len(record.metrics)} steps"]
    if settings:
        parallel = settings["trainer"]["parallel"]
        parts += [
            str(settings["model"]),
            f"{settings['engine']['format']} rollouts",
            f"trainer tp {parallel['tensor']} pp {parallel['pipeline']} dp {parallel['data']}",
        ]
    commit = str(record.environment.get("commit") or "")
    return " · ".join([*parts, *([f"commit {commit[:12]}"] if commit else [])])


def _summary(record: Record) -> str:
    """Tiles: main metrics of the first and the last step, and the time of the run."""
    items = [
        (f"{change.label} accuracy, {change.format_label}", _change(change), f"{change.points:+.1f} points")
        for change in changes(record.evaluation)
        if change.before.data_source == "all"
    ]
    for metric, label, form in (
        ("reward/mean", "reward", ".3f"),
        ("response_length/mean", "response tokens", ".0f"),
        ("history/tokens_per_forward", "tokens per forward", ".2f"),
        ("rollout_corr/k3_kl", "k3, sampler to trainer", ".1e"),
        ("timeline/bubble", "bubble of the engines' time", ".0%"),
    ):
        if values := _values(record.metrics, metric):
            items.append((label, f"{values[0]:{form}} → {values[-1]:{form}}", "first and last step"))
    if seconds := _values(record.metrics, "timing_s/step"):
        items.append(("seconds a step", f"{sum(seconds) / len(seconds):.1f}", f"{sum(seconds):.0f} s in total"))
    return tiles(items)


def _change(change: Change) -> str:
    return f"{100 * change.before.average:.1f} → {100 * change.after.average:.1f} %"


def _evaluation(record: Record) -> str:
    if not record.evaluation:
        return ""
    heading = ("set", "engine", "prompts", "k", "avg@k before", "after", "points", "pass@k before", "after", "length")
    rows = [
        (
            change.label,
            change.format_label,
            str(change.before.num_prompts),
            str(change.before.samples_per_prompt),
            f"{change.before.average:.3f}",
            f"{change.after.average:.3f}",
            f"{change.points:+.1f}",
            f"{change.before.passed:.3f}",
            f"{change.after.passed:.3f}",
            f"{change.before.mean_length:.0f} → {change.after.mean_length:.0f}",
        )
        for change in changes(record.evaluation)
    ]
    return section("Evaluation", table(heading, rows, numbers_from=2) + _evaluation_curve(record.evaluation))


def _evaluation_curve(rows: Sequence[EvaluationRow]) -> str:
    """avg@k over steps, for sets with more than two evaluations."""
    curves: dict[str, list[EvaluationRow]] = {}
    for row in sorted(rows, key=lambda row: row.step):
        if row.data_source == "all":
            curves.setdefault(f"{row.set_name} ({row.format})", []).append(row)
    long = {label: of_label for label, of_label in curves.items() if len(of_label) > 2}
    series = [
        Series(label=label, steps=[row.step for row in of_label], values=[row.average for row in of_label])
        for label, of_label in long.items()
    ]
    return f'<figure class="wide">{lines("evaluation", series, unit="avg@k")}</figure>' if series else ""


def _charts(metrics: Metrics) -> str:
    charts = [
        ("Reward", _chart(metrics, "reward", {"reward/mean": "mean", "reward/std": "standard deviation"})),
        (
            "Response length",
            _chart(
                metrics, "length", {"response_length/mean": "mean", "response_length/max": "longest"}, unit="tokens"
            ),
        ),
        (
            "Mismatch of sampler and trainer: k3 (dashed: healthy below)",
            _chart(metrics, "k3", {"rollout_corr/k3_kl": "k3"}, log=True, limit=K3_BOUND),
        ),
        (
            "Effective sample size of the importance weights",
            _chart(metrics, "ess", {"rollout_corr/rollout_is_eff_sample_size": "ESS"}, unit="share"),
        ),
        ("Time by phase", _phases(metrics)),
        ("Throughput", _chart(metrics, "speed", {"perf/throughput_tokens_s": "tokens/s"}, unit="response tokens/s")),
        ("Entropy", _chart(metrics, "entropy", {"actor/entropy": "entropy"}, unit="nats a token")),
        ("Gradient norm", _chart(metrics, "grad", {"actor/grad_norm": "norm"})),
    ]
    return section("Training", grid(charts))


def _drafts(metrics: Metrics) -> str:
    """Charts of drafts from history; empty for a run without drafts."""
    if not _values(metrics, "history/tokens_per_forward"):
        return ""
    charts = [
        (
            "Tokens per forward (dashed: without drafts)",
            _chart(metrics, "tokens_per_forward", {"history/tokens_per_forward": "tokens"}, unit="tokens", limit=1.0),
        ),
        ("Accepted draft tokens by source", _sources(metrics)),
        (
            "Tokens reusable from the prompts' last visit",
            _chart(metrics, "reuse", {"history/reusable_share": "share"}, unit="share of tokens"),
        ),
        (
            "Mean lengths of prompts: this visit against the last",
            _chart(metrics, "ranks", {"history/length_rank_correlation": "rank"}, unit="rank correlation"),
        ),
        (
            "Draft tokens: predicted and observed acceptance",
            _chart(metrics, "calibration", {"history/calibration_error": "error"}, unit="calibration error"),
        ),
        (
            "Seconds saved by drafts",
            _chart(
                metrics,
                "saved",
                {"history/saved_s_estimated": "estimated", "history/saved_s_measured": "measured"},
                unit="seconds a step",
            ),
        ),
    ]
    return section("Drafts from history", grid(charts))


def _publishing(metrics: Metrics) -> str:
    """Charts of publishes: time, bytes and quantisation error."""
    steps = [row["step"] + 1 for row in metrics]
    stages = {stage: [row.get(f"timing_s/publish_{stage}", 0.0) for row in metrics] for stage in PUBLISH_STAGES}
    nonzero = {stage: seconds for stage, seconds in stages.items() if any(seconds)}
    seconds = stacked("publish", steps, nonzero, unit="seconds") if nonzero else ""
    charts = [
        ("Seconds by stage, slowest rank of each", seconds),
        ("Bytes sent", _chart(metrics, "wire", {"publish/wire_bytes": "bytes"}, unit="bytes")),
        ("SQNR of 8-bit weights by layer, after the last step", _sqnr(metrics)),
        (
            "Share of codes that a step changed",
            _chart(metrics, "changed", {"publish/changed_share": "share"}, unit="share of codes"),
        ),
    ]
    return section("Publishing", grid(charts)) if any(chart for _, chart in charts) else ""


def _sqnr(metrics: Metrics) -> str:
    prefix = "publish/sqnr_db/layer_"
    last = {int(key.removeprefix(prefix)): value for key, value in metrics[-1].items() if key.startswith(prefix)}
    layers = sorted(last)
    series = Series(label="SQNR", steps=layers, values=[last[layer] for layer in layers])
    return lines("sqnr", [series], unit="dB", over="layer") if last else ""


def _sources(metrics: Metrics) -> str:
    rows = [row for row in metrics if row.get("history/accepted_tokens", 0) > 0]
    parts = {
        name: [row["history/accepted_tokens"] * row.get(f"history/accepted_share/{name}", 0.0) for row in rows]
        for name in SOURCES
    }
    steps = [row["step"] + 1 for row in rows]
    return stacked("sources", steps, parts, unit="tokens a step") if rows else ""


def _chart(
    metrics: Metrics,
    name: str,
    labels: Mapping[str, str],
    *,
    unit: str = "",
    log: bool = False,
    limit: float | None = None,
) -> str:
    series = []
    for metric, label in labels.items():
        rows = [row for row in metrics if metric in row and (row[metric] > 0 or not log)]
        if rows:
            steps = [row["step"] + 1 for row in rows]
            series.append(Series(label=label, steps=steps, values=[row[metric] for row in rows]))
    return lines(name, series, unit=unit, log=log, limit=limit) if series else ""


def _phases(metrics: Metrics) -> str:
    steps = [row["step"] + 1 for row in metrics]
    parts = {phase: [row.get(f"timing_s/{phase}", 0.0) for row in metrics] for phase in PHASES}
    nonzero = {phase.removesuffix("_before_step"): seconds for phase, seconds in parts.items() if any(seconds)}
    return stacked("phases", steps, nonzero, unit="seconds") if nonzero else ""


def _values(metrics: Metrics, metric: str) -> list[float]:
    return [row[metric] for row in metrics if metric in row]


def _samples(record: Record) -> str:
    """A few responses of the first and the last step, best and worst rewards first."""
    blocks = []
    for step, rows in record.samples.items():
        chosen = _spread(sorted(rows, key=lambda row: _reward(row), reverse=True))
        cards = "".join(_card(row) for row in chosen)
        blocks.append(f"<h3>step {step + 1}</h3>{cards}")
    return section("Samples", "".join(blocks)) if blocks else ""


def _spread(rows: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    """Evenly spread rows of a sorted list, both ends included."""
    if len(rows) <= SAMPLES_SHOWN:
        return rows
    return [rows[index * (len(rows) - 1) // (SAMPLES_SHOWN - 1)] for index in range(SAMPLES_SHOWN)]


def _reward(row: Mapping[str, object]) -> float:
    reward = row.get("reward")
    return float(reward) if isinstance(reward, int | float) else 0.0


def _card(row: Mapping[str, object]) -> str:
    facts = f"reward {_reward(row):g} · truth {row.get('ground_truth')} · {row.get('length')} tokens"
    prompt, response = (html.escape(str(row.get(key, ""))) for key in ("prompt", "response"))
    return (
        f'<div class="card"><p>{html.escape(facts)}</p><pre>{prompt}</pre><pre class="response">{response}</pre></div>'
    )


def _settings(record: Record) -> str:
    environment = html.escape(json.dumps(record.environment, indent=2))
    config = html.escape(record.config_text)
    return section(
        "Settings",
        f"<details><summary>configuration</summary><pre>{config}</pre></details>"
        f"<details><summary>environment</summary><pre>{environment}</pre></details>",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m launcher.report RUN_DIR`."""
    parser = argparse.ArgumentParser(prog="python -m launcher.report", description="Write report.html of a run.")
    parser.add_argument("run_dir", type=Path)
    arguments = parser.parse_args(argv)
    try:
        print(write_report(arguments.run_dir))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
