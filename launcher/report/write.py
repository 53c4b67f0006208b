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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from history.drafting.stats import SOURCES
from launcher.report.charts import Line, line_chart, note, stacked_chart
from launcher.report.chrome_trace import write_trace
from launcher.report.fleet import fleet_section
from launcher.report.html import grid, page, section, table, tiles
from launcher.report.metric_table import MetricTable
from launcher.report.mismatch_section import mismatch_section
from launcher.report.reading import RecordReader
from launcher.report.run_timeline import RunTimeline, read_timeline
from launcher.report.timeline_section import last_steps, timeline_section
from launcher.run_dir.atomic_files import left_out, replace_text
from launcher.run_dir.places import Places
from launcher.run_dir.step_files import step_files
from launcher.run_dir.step_timeline import BETWEEN_STEPS
from rollout.evaluation import WHOLE_SET, Change, EvaluationRow, changes, comparable, notes

K3_BOUND = 5e-3
"""Largest healthy gap between sampler and trainer (docs/metrics.md)."""
PHASES = ("rollout", "train", "publish", "switch")
PUBLISH_STAGES = ("scales", "pack", "send", "pause", "apply", "probe")
SAMPLES_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Records of a run directory, read once."""

    name: str
    metrics: MetricTable
    timeline: RunTimeline
    places: Places | None
    """Nodes of engines and trainer ranks; None if the run did not record them."""
    evaluation: Sequence[EvaluationRow]
    samples: Mapping[int, Sequence[Mapping[str, object]]]
    """Rows of the first and the last step that have metrics, by step."""
    config_text: str
    settings: Mapping[str, object]
    """Keys of the configuration."""
    environment: Mapping[str, object]
    notes: Sequence[str]
    """Sentences about damaged records that are left out."""


def read_record(run_dir: Path) -> Record:
    """The records of `run_dir`; raises `FileNotFoundError` if it holds no metrics."""
    if not (run_dir / "metrics.jsonl").exists():
        raise FileNotFoundError(
            f"{run_dir} holds no metrics.jsonl; name the run directory of a run that has finished a step"
        )
    reader, metrics = RecordReader(run_dir), MetricTable.read(run_dir)
    config_text, settings = reader.config()
    return Record(
        name=run_dir.resolve().name,
        metrics=metrics,
        timeline=read_timeline(run_dir, metrics),
        places=reader.places(),
        evaluation=reader.evaluation(),
        samples=_read_samples(reader, metrics),
        config_text=config_text,
        settings=settings,
        environment=reader.environment(),
        notes=[*left_out(run_dir / "metrics.jsonl", metrics.num_damaged), *reader.notes],
    )


def _read_samples(reader: RecordReader, metrics: MetricTable) -> dict[int, Sequence[Mapping[str, object]]]:
    """Samples of the first and the last step, by step.

    Files beyond the last row of metrics are of steps that a resume takes again, perhaps with other samples.
    """
    last = metrics.filled("step")[-1] if metrics.num_rows else -1
    numbered = [(step, path) for step, path in step_files(reader.run_dir / "samples") if step <= last]
    return {step: reader.rows(path) for step, path in [*numbered[:1], *numbered[1:][-1:]]}


def write_report(run_dir: Path) -> Path:
    """Writes `report.html`, then `timeline.json`; returns the path of the report.

    Raises `FileNotFoundError` if the directory holds no metrics.
    """
    record = read_record(run_dir)
    metrics = record.metrics
    target = run_dir / "report.html"
    body = "".join(
        (
            note(metrics.num_rows),
            "".join(f'<p class="note">{html.escape(text)}.</p>' for text in record.notes),
            _summary(record),
            _evaluation(record),
            _charts(metrics),
            mismatch_section(metrics),
            timeline_section(record.timeline, metrics),
            fleet_section(record.timeline, record.places, last_steps(record.timeline.steps)),
            _drafts(metrics),
            _publishing(metrics),
            _samples(record),
            _settings(record),
        )
    )
    replace_text(target, page(title=record.name, subtitle=_subtitle(record), body=body))
    write_trace(run_dir, record.timeline)
    return target


def _subtitle(record: Record) -> str:
    parts = [f"{record.metrics.num_rows} steps"]
    with suppress(KeyError):  # no configuration, or a part of one
        parts += _of_settings(record.settings)
    commit = str(record.environment.get("commit") or "")
    return " · ".join([*parts, *([f"commit {commit[:12]}"] if commit else [])])


def _of_settings(settings: Mapping[str, object]) -> list[str]:
    tensor, pipeline, data = (_value(settings, f"trainer.parallel.{key}") for key in ("tensor", "pipeline", "data"))
    return [
        str(_value(settings, "model")),
        f"{_value(settings, 'engine.format')} rollouts",
        f"trainer tp {tensor} pp {pipeline} dp {data}",
    ]


def _value(settings: Mapping[str, object], key: str) -> object:
    """The value of a dotted key; raises `KeyError` without it."""
    found: object = settings
    for name in key.split("."):
        if not isinstance(found, Mapping):
            raise KeyError(key)
        found = found[name]
    return found


def _summary(record: Record) -> str:
    """Tiles: main metrics of the first and the last step, and the time of the run."""
    items = [
        (f"{change.label} {_what(change)}, {change.format_label}", _change(change), _gain(change))
        for change in changes(record.evaluation)
        if change.before.data_source == WHOLE_SET
    ]
    for metric, label, form in (
        ("reward/mean", "reward", ".3f"),
        ("response_length/mean", "response tokens", ".0f"),
        ("history/tokens_per_forward", "tokens per forward", ".2f"),
        ("rollout_corr/k3_kl", "k3, sampler to trainer", ".2g"),
        ("timeline/bubble", "bubble of the engines' time", ".0%"),
    ):
        values = record.metrics.values(metric)
        if len(values):
            items.append((label, f"{values[0]:{form}} → {values[-1]:{form}}", "first and last step"))
    seconds = record.metrics.seconds()
    if (total_s := seconds.sum().item()) > 0:
        total = f"{total_s / 3600:.1f} h" if total_s > 2 * 3600 else f"{total_s:.0f} s"
        items.append(("seconds a step", f"{total_s / len(seconds):.1f}", f"{total} from the first step to the last"))
    return tiles(items)


def _what(change: Change) -> str:
    return "accuracy" if change.is_accuracy else "mean score"


def _change(change: Change) -> str:
    before, after = change.before.average, change.after.average
    return f"{100 * before:.1f} → {100 * after:.1f} %" if change.is_accuracy else f"{before:.3f} → {after:.3f}"


def _gain(change: Change) -> str:
    k, steps = change.before.samples_per_prompt, f"{change.before.step} to {change.after.step}"
    gain = f"{change.points:+.1f} points" if change.is_accuracy else f"{change.gain:+.3f}"
    return f"{gain} of avg@{k}, {steps} steps"


def _evaluation(record: Record) -> str:
    """Table, curves, and a sentence per set that could not be compared or has scores of another scale.

    Empty without evaluations of two steps.
    """
    found = changes(record.evaluation)
    sentences = "".join(f'<p class="note">{html.escape(text)}.</p>' for text in notes(record.evaluation))
    if not found:
        return section("Evaluation", sentences) if sentences else ""
    heading = (
        *("set", "engine", "prompts", "k", "after steps"),
        *("avg@k before", "after", "points", "pass@k before", "after", "length"),
    )
    rows = [
        (
            change.label,
            change.format_label,
            str(change.before.num_prompts),
            str(change.before.samples_per_prompt),
            f"{change.before.step} → {change.after.step}",
            f"{change.before.average:.3f}",
            f"{change.after.average:.3f}",
            f"{change.points:+.1f}" if change.is_accuracy else "",
            f"{change.before.passed:.3f}",
            f"{change.after.passed:.3f}",
            f"{change.before.mean_length:.0f} → {change.after.mean_length:.0f}",
        )
        for change in found
    ]
    compared = table(heading, rows, numbers_from=2) + _evaluation_curves(record.evaluation)
    return section("Evaluation", compared + sentences)


def _evaluation_curves(rows: Sequence[EvaluationRow]) -> str:
    """avg@k over steps, for sets with more than two comparable evaluations; accuracies apart from other scales."""
    curves = [curve for curve in comparable(rows) if curve[0].data_source == WHOLE_SET and len(curve) > 2]
    accuracies = [curve for curve in curves if all(row.other_scale is None for row in curve)]
    scores = [curve for curve in curves if curve not in accuracies]
    return _curves("Accuracy", accuracies) + _curves("Mean score", scores)


def _curves(title: str, curves: Sequence[Sequence[EvaluationRow]]) -> str:
    labels = [_curve_label(curve[0]) for curve in curves]
    lines = [
        Line(
            # curves of one label have other settings
            label=label if labels.count(label) == 1 else f"{label}, steps {curve[0].step} to {curve[-1].step}",
            at=[row.step for row in curve],
            values=[row.average for row in curve],
        )
        for label, curve in zip(labels, curves, strict=True)
    ]
    if not lines:
        return ""
    return f'<figure class="wide"><figcaption>{title} <span>avg@k</span></figcaption>{line_chart(lines)}</figure>'


def _curve_label(row: EvaluationRow) -> str:
    return f"{row.set_name} ({row.format}, avg@{row.samples_per_prompt}, {row.num_prompts} prompts)"


def _charts(metrics: MetricTable) -> str:
    charts = [
        ("Reward", "", _chart(metrics, {"reward/mean": "mean", "reward/std": "standard deviation"})),
        (
            "Response length",
            "tokens",
            _chart(metrics, {"response_length/mean": "mean", "response_length/max": "longest"}),
        ),
        (
            "Mismatch of sampler and trainer",
            "k3; dashed: healthy below",
            _chart(metrics, {"rollout_corr/k3_kl": "k3"}, log=True, limit=K3_BOUND),
        ),
        (
            "Effective sample size of the importance weights",
            "share",
            _chart(metrics, {"rollout_corr/rollout_is_eff_sample_size": "ESS"}),
        ),
        ("Time by phase", "seconds", _phases(metrics)),
        ("Throughput", "response tokens per second", _chart(metrics, {"perf/throughput_tokens_s": "tokens/s"})),
        ("Entropy", "nats per token", _chart(metrics, {"actor/entropy": "entropy"})),
        ("Gradient norm", "", _chart(metrics, {"actor/grad_norm": "norm"})),
    ]
    return section("Training", grid(charts))


def _drafts(metrics: MetricTable) -> str:
    """Charts of drafts from history; empty for a run without drafts."""
    if not len(metrics.values("history/tokens_per_forward")):
        return ""
    saved = {"history/saved_s_estimated": "estimated", "history/saved_s_measured": "measured"}
    charts = [
        (
            "Tokens per forward",
            "dashed: without drafts",
            _chart(metrics, {"history/tokens_per_forward": "tokens"}, limit=1.0),
        ),
        ("Accepted draft tokens by source", "tokens a step", _sources(metrics)),
        (
            "Tokens reusable from the prompts' last visit",
            "share of tokens",
            _chart(metrics, {"history/reusable_share": "share"}),
        ),
        (
            "Mean lengths of prompts: this visit against the last",
            "rank correlation",
            _chart(metrics, {"history/length_rank_correlation": "rank"}),
        ),
        (
            "Draft tokens: predicted and observed acceptance",
            "calibration error",
            _chart(metrics, {"history/calibration_error": "error"}),
        ),
        ("Seconds saved by drafts", "seconds a step", _chart(metrics, saved)),
    ]
    return section("Drafts from history", grid(charts))


def _publishing(metrics: MetricTable) -> str:
    """Charts of publishes: time, bytes and quantisation error."""
    stages = {f"timing_s/publish_{stage}": stage for stage in PUBLISH_STAGES}
    charts = [
        ("Time by stage, slowest rank of each", "seconds", _stacked(metrics, stages)),
        ("Sent", "bytes", _chart(metrics, {"publish/wire_bytes": "bytes"})),
        ("SQNR of 8-bit weights by layer, after the last step", "dB", _sqnr(metrics)),
        ("Codes that a step changed", "share of codes", _chart(metrics, {"publish/changed_share": "share"})),
    ]
    return section("Publishing", grid(charts)) if any(chart for *_, chart in charts) else ""


def _sqnr(metrics: MetricTable) -> str:
    prefix = "publish/sqnr_db/layer_"
    last = {int(key.removeprefix(prefix)): value for key, value in metrics.last_row().items() if key.startswith(prefix)}
    layers = sorted(last)
    if not layers:
        return ""
    worst = min(layers, key=lambda layer: last[layer])
    shown = f"{last[worst]:.1f} in layer {worst}, the worst"
    return line_chart(
        [Line(label="SQNR", at=layers, values=[last[layer] for layer in layers], shown=shown)], over="layer"
    )


def _sources(metrics: MetricTable) -> str:
    numbers, accepted = metrics.column("history/accepted_tokens")
    numbers, accepted = numbers[accepted > 0], accepted[accepted > 0]
    steps = metrics.filled("step")[numbers] + 1
    shares = {name: metrics.filled(f"history/accepted_share/{name}")[numbers] for name in SOURCES}
    return stacked_chart([Line(label=name, at=steps, values=accepted * share) for name, share in shares.items()])


def _chart(metrics: MetricTable, labels: Mapping[str, str], *, log: bool = False, limit: float | None = None) -> str:
    lines = []
    for metric, label in labels.items():
        numbers, values = metrics.column(metric)
        if len(numbers):
            lines.append(Line(label=label, at=metrics.filled("step")[numbers] + 1, values=values, hint=metric))
    return line_chart(lines, log=log, limit=limit)


def _phases(metrics: MetricTable) -> str:
    between = {f"timing_s/{phase}_before_step": f"{phase}, before the step" for phase in BETWEEN_STEPS}
    return _stacked(metrics, {f"timing_s/{phase}": phase for phase in PHASES} | between)


def _stacked(metrics: MetricTable, labels: Mapping[str, str]) -> str:
    """Areas of the metrics that are not 0 throughout."""
    steps = metrics.filled("step") + 1
    columns = {metric: metrics.filled(metric) for metric in labels}
    return stacked_chart(
        [
            Line(label=labels[metric], at=steps, values=values, hint=metric)
            for metric, values in columns.items()
            if values.any()
        ]
    )


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
