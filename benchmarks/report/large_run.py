"""Run directories of the size of a large run, written through the product's own run directory.

Names come from the registry of metrics, so a row has the length of a real row. Values are invented: each metric follows
a curve for its unit, with noise, and every kind of fault happens a few times. Forwards exist for the last steps only,
until they exceed what a report reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from launcher.config.loading import resolved_yaml
from launcher.config.schema import RunConfig
from launcher.metrics.registry import METRICS, Metric
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.forward_traces import append_forwards
from launcher.run_dir.places import Places, write_places
from rollout.evaluation import EvaluationRow
from rollout.tracing.forwards import FORWARD, Forwards
from rollout.tracing.timeline import Part

ORIGIN_S = 1.7e9
ROLLOUT_S, TRAIN_S, PUBLISH_S, CHECKPOINT_S = 80.0, 25.0, 4.0, 6.0
STEPS_PER_CHECKPOINT = 50
FORWARD_S, GAP_S = 0.060, 0.004
NUM_REQUESTS = 128
NUM_LAYERS = 64
FAULT_SHARE = 0.002
"""Share of the steps in which a metric that is 0 in a healthy run is not."""
_TYPICAL = {
    "nats per token": 0.002,
    "nats": 0.4,
    "tokens": 14_000.0,
    "response tokens": 1e8,
    "tokens per second": 2e5,
    "seconds": 4.0,
    "bytes": 3.3e10,
    "dB": 34.0,
    "responses": 8_192.0,
    "groups": 512.0,
    "engines": 64.0,
    "learning rate": 1e-6,
    "policy versions": 1.0,
    "gradient norm": 0.3,
    "share": 0.3,
}
"""Level of metrics by their unit; 1 for others."""
_LEVELS = {
    "actor/entropy": 0.6,
    "actor/pg_clipfrac": 0.002,
    "actor/pg_clipfrac_lower": 0.0004,
    "history/tokens_per_forward": 2.6,
    "history/acceptance_rate": 0.7,
    "batch/micro_batch_fill": 0.97,
    "batch/rank_imbalance": 0.02,
    "publish/saturated_share": 0.004,
    "response_length/max": 32_768.0,
    "rollout_corr/rollout_is_eff_sample_size": 0.998,
    "rollout_corr/kept_fraction": 0.9995,
    "rollout_corr/clip_fraction": 0.0006,
    "rollout_corr/stale_1/k3_kl": 0.003,
    "timing_s/rollout": ROLLOUT_S,
    "timing_s/train": TRAIN_S,
    "timing_s/publish": PUBLISH_S,
}
_PARTS = {"layer": [str(layer) for layer in range(NUM_LAYERS)], "age": ["0", "1"], "source": ["prompt", "group"]}
"""Names that stand for a part in braces; patterns of other parts are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a run directory; four engines and four trainer ranks share a node."""

    num_steps: int
    num_engines: int
    trace_bytes: int
    """Least bytes of forwards in `traces/`, of all engines together."""


def write_large_run(path: Path, size: Size, *, seed: int, settings: Mapping[str, object] | None = None) -> None:
    """Write a whole run directory; `settings` override those of the run."""
    random = np.random.default_rng(seed)
    curves = dict(_curves(size.num_steps, random))
    nodes = tuple(f"gpu-{number // 4:03d}" for number in range(size.num_engines))
    now = ORIGIN_S
    starts_s = []
    with RunDirectory(path) as run:
        run.write_config(resolved_yaml(_config(path, size.num_steps, settings or {})))
        run.write_environment({"commit": "0123456789abcdef"})
        write_places(path, Places(engines=nodes, trainers=nodes))
        for step in range(size.num_steps):
            starts_s.append(now)
            began = now
            if step and step % STEPS_PER_CHECKPOINT == 0:
                run.record_span("trainer", "checkpoint", now, now + CHECKPOINT_S)
                run.append_evaluation([_evaluation(step, step / size.num_steps).as_row()])
                now += CHECKPOINT_S
            metrics = {name: float(values[step]) for name, values in curves.items()}
            for actor, activity in (("engines", "rollout"), ("trainer", "train"), ("publisher", "publish")):
                end_s = now + metrics[f"timing_s/{activity}"]
                run.record_span(actor, activity, now, end_s)
                now = end_s
            metrics |= {"timing_s/step": now - began, "timeline/elapsed_s": now - began}
            run.append_metrics(step, metrics, ended_s=now)
        _write_forwards(path / "traces", size, starts_s, curves["timing_s/rollout"], random)


def _config(path: Path, num_steps: int, settings: Mapping[str, object]) -> RunConfig:
    base = {
        "model": "Qwen/Qwen3-32B",
        "run_dir": str(path),
        "num_steps": num_steps,
        "data": {"train": [{"path": "train.parquet"}]},
        "engine": {"format": "int8"},
    }
    return RunConfig.model_validate({**base, **settings})


def _curves(num_steps: int, random: np.random.Generator) -> Iterator[tuple[str, npt.NDArray[np.float64]]]:
    """A value for each step of every metric that has a name."""
    shares = _bubble(num_steps, random)
    for metric in METRICS:
        for name in _names(metric.name):
            yield name, shares[name] if name in shares else _curve(metric, name, num_steps, random)


def _names(pattern: str) -> list[str]:
    """The names that a pattern stands for; none where a run has names of its own, as in evaluations."""
    for part, values in _PARTS.items():
        if f"{{{part}}}" in pattern and not pattern.startswith("eval/"):
            return [pattern.replace(f"{{{part}}}", value) for value in values]
    return [] if "{" in pattern else [pattern]


def _curve(metric: Metric, name: str, num_steps: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    at = np.linspace(0.0, 1.0, num_steps)
    noise = random.lognormal(0.0, 0.1, size=num_steps)
    if metric.healthy == "0":
        faults = (random.random(num_steps) < FAULT_SHARE) * random.integers(1, 5, size=num_steps)
        return np.cumsum(faults) if metric.reduction == "total" else faults.astype(np.float64)
    if name.startswith("reward/"):
        level = {"reward/min": 0.0, "reward/max": 1.0, "reward/std": 0.45}.get(name)
        return np.full(num_steps, level) if level is not None else 0.2 + 0.5 * at**0.5 + 0.03 * (noise - 1)
    if metric.unit == "engines":
        return np.where((at > 0.4) & (at < 0.43), 60.0, 64.0)
    level = _LEVELS.get(name, _TYPICAL.get(metric.unit, 1.0))
    drift = 1.0 + 0.3 * np.sin(5 * at + len(name))
    if metric.unit in ("share", "correlation") or level > 20_000:
        return np.minimum(level * (1 + 0.05 * (noise - 1)), max(level, 1.0))
    spikes = np.where(random.random(num_steps) < 3 / num_steps, 6.0, 1.0)
    return np.asarray(level * drift * noise * spikes)


def _bubble(num_steps: int, random: np.random.Generator) -> dict[str, npt.NDArray[np.float64]]:
    """Shares of the engines' time that sum to 1, and the sums of them that a row also holds."""
    weights = np.array([60, 14, 8, 9, 3, 3, 1.5, 1.5])
    of_part = dict(zip(Part, random.dirichlet(weights * 5, size=num_steps).T, strict=True))
    saturated, underfilled = of_part.pop(Part.SATURATED), of_part[Part.UNDERFILLED]
    return {
        **{f"timeline/{part.value}_share": share for part, share in of_part.items()},
        "timeline/bubble": 1 - saturated,
        "timeline/idle_share": 1 - saturated - underfilled,
        "timeline/tail_share": underfilled + of_part[Part.TAIL_WAIT],
    }


def _evaluation(step: int, share: float) -> EvaluationRow:
    return EvaluationRow(
        set_name="aime",
        data_source="all",
        format="int8",
        step=step,
        num_prompts=30,
        samples_per_prompt=16,
        average=0.2 + 0.4 * share,
        passed=0.4 + 0.4 * share,
        truncated=0.1,
        mean_length=14_000.0,
    )


def _write_forwards(
    traces: Path,
    size: Size,
    starts_s: list[float],
    rollout_s: npt.NDArray[np.float64],
    random: np.random.Generator,
) -> None:
    """Forwards of the last steps: each engine is full at first, then has fewer and fewer requests."""
    written, first = 0, size.num_steps
    while first > 0 and written < size.trace_bytes:
        first -= 1
        written += int(rollout_s[first] / (FORWARD_S + GAP_S)) * FORWARD.itemsize * size.num_engines
    for engine in range(size.num_engines):
        for step in range(first, size.num_steps):
            busy_s = rollout_s[step] * random.uniform(0.7, 1.0)
            append_forwards(traces, engine, _forwards(starts_s[step], busy_s, random))


def _forwards(start_s: float, busy_s: float, random: np.random.Generator) -> Forwards:
    count = int(busy_s / (FORWARD_S + GAP_S))
    left = np.minimum(1.0, 2.0 * (1 - np.arange(count) / count))
    forwards = np.zeros(count, dtype=FORWARD)
    forwards["num_running"] = np.maximum(1, NUM_REQUESTS * left)
    forwards["num_scheduled_tokens"] = 2.6 * forwards["num_running"]
    forwards["num_context_tokens"] = 7_000 * forwards["num_running"].astype(np.int64)
    forwards["seconds"] = FORWARD_S * (0.4 + 0.6 * left) * random.uniform(0.97, 1.03, size=count)
    forwards["started_at_s"] = start_s + (FORWARD_S + GAP_S) * np.arange(count)
    return forwards
