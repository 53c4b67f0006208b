"""The runs that are disturbed: three steps of the arithmetic example's untrained model."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from benchmarks.faults import slow_reward
from benchmarks.faults.cells import RunKind

NUM_STEPS = 3
PROMPTS, SAMPLES = 4, 4

_REWARD: Mapping[str, object] = {"timeout_s": 15.0}
"""Calls take half a second at most, also on a machine that is busy with other things for a while."""
SLOW_REWARD = {**_REWARD, "function": f"{slow_reward.__name__}.compute_score", "num_workers": 4}
"""Scores are equal, so the run is compared with the undisturbed one of its kind."""
_COMMON: Mapping[str, object] = {
    "num_steps": NUM_STEPS,
    "sampling": {"temperature": 1.0, "max_response_tokens": 48},
    "algorithm": {"prompts_per_step": PROMPTS, "group_size": SAMPLES, "filter": "none"},
    "reward": _REWARD,
    "publish": {"timeout_s": 60.0},
    "checkpoint": {"every": 1},
    "wandb": {"mode": "disabled"},
}
_ENGINE = {
    "max_num_seqs": 64,
    "kv_cache_bytes": 64 << 20,
    "progress_timeout_s": 20.0,
    "update_timeout_s": 60.0,
    "start_timeout_s": 150.0,
}
_TRAINER = {
    "dtype": "fp32",
    "max_micro_batch_tokens": 512,
    "optimizer": {"learning_rate": 1e-3},
    "timeout_s": 120.0,
    "progress_timeout_s": 30.0,
}


def make_example(work: Path) -> None:
    """Write data and an untrained model below `work`."""
    sizes = ["--train", "64", "--held-out", "16", "--warm-start", "512"]
    for module, folder, more in (("make_data", "data", sizes), ("make_model", "model", [])):
        line = [sys.executable, "-m", f"examples.arithmetic.{module}", "--out", str(work / folder), *more]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write_config(work: Path, kind: RunKind, *, scores_slowly: bool = False) -> Path:
    """The configuration of a kind of run, in a file below `work`. With `scores_slowly`, scoring takes seconds."""
    sets = {"held_out": {"path": str(work / "data" / "held_out.jsonl"), "max_response_tokens": 32, "limit": 8}}
    config = {
        **_COMMON,
        "model": str(work / "model"),
        "run_dir": "",
        "data": {"train": [{"path": str(work / "data" / "train.jsonl")}], "max_prompt_tokens": 96},
        "evaluation": {"bf16_before_after": False, "sets": sets},
        **_OF_KIND[kind],
        **({"reward": SLOW_REWARD} if scores_slowly else {}),
    }
    path = work / f"{kind}{'-scoring' if scores_slowly else ''}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


_OF_KIND: Mapping[RunKind, Mapping[str, object]] = {
    "exact": {
        "deterministic": True,
        "engine": {**_ENGINE, "format": "bf16"},
        "trainer": {**_TRAINER, "parallel": {"tensor": 2}},
    },
    "ahead": {
        "engine": {**_ENGINE, "max_num_seqs": 12, "format": "int8"},
        "trainer": {**_TRAINER, "parallel": {"data": 2}},
        "placement": {"mode": "disaggregated"},
        "planner": {"overlap": 1, "max_staleness": 1},
        "publish": {"timeout_s": 60.0, "delta": True},
    },
    "drafting": {"engine": {**_ENGINE, "format": "int8"}, "trainer": _TRAINER},
}
