"""Runs the example's RL with given configuration keys, from a quickstart's data and warm start."""

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.process_tree import watch

K3 = "rollout_corr/k3_kl"
ESS = "rollout_corr/rollout_is_eff_sample_size"
"""Metric of runs with a correction; other runs have no importance weights."""
K3_PARTS = ("quantisation", "numerics", "speculation", "interaction", "total")
"""Parts of k3 by cause that a run without tokens of older weights measures, and their sum."""


def run_example(warm: Path, run_dir: Path, keys: Sequence[str]) -> tuple[list[dict[str, float]], float]:
    """Metrics of all steps, and the seconds of the run. Its output is written to a log beside `run_dir`.

    Args:
        warm: work directory of a quickstart.
        run_dir: directory of the run; existing files are removed.
        keys: `key=value` each; they take precedence over the example's configuration.

    Raises:
        SystemExit: the run failed; the message has the end of its output.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "launcher", "run", "examples/arithmetic/rl.yaml", f"model={warm / 'warm'}"),
        *(f"run_dir={run_dir}", f"data.train.0.path={warm / 'data' / 'train.jsonl'}", *keys),
    ]
    log = run_dir.with_suffix(".log")
    code, seconds, _ = watch(command, log=log)
    if code:
        raise SystemExit(f"exit code {code}; the end of {log}:\n{log.read_text(encoding='utf-8')[-3000:]}")
    return read_metrics(run_dir), seconds


def few_prompts(warm: Path, path: Path, count: int) -> Path:
    """The first prompts of a quickstart's training data, written to `path`, which is returned."""
    prompts = (warm / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(prompts[:count]), encoding="utf-8")
    return path


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Metrics of all steps of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def trained(metrics: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The steps that trained; a step whose groups were all dropped has no mismatch metrics."""
    return [row for row in metrics if K3 in row]


def mismatch_figures(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """k3 and effective sample size over the steps that trained; empty if no step did."""
    steps = trained(metrics)
    if not steps:
        return {}
    k3 = [row[K3] for row in steps]
    return {
        "k3_median": statistics.median(k3),
        "k3_min": min(k3),
        "k3_max": max(k3),
        "ess_min": min(row.get(ESS, 1.0) for row in steps),
    }


def k3_parts(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each part of k3 over the steps that measured it, by `k3_{part}`; a part that no step has is 0."""
    steps = [row for row in metrics if "rollout_corr/part_k3/total" in row]
    names = {part: f"rollout_corr/part_k3/{part}" for part in K3_PARTS}
    return {
        f"k3_{part}": statistics.fmean(row.get(name, 0.0) for row in steps) if steps else 0.0
        for part, name in names.items()
    }
