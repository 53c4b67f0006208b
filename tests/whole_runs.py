"""Whole runs through the command line, as the tests of runs configure, start and read them.

One tiny model (the example's, untrained) and its data.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from tests.background import popen

NUM_STEPS = 4
DEADLINE_S = 400
NOT_REPEATABLE = ("timing_s/", "perf/", "time_s")


def make_example(work: Path) -> Path:
    """Data and an untrained model of the arithmetic example; returns `work`."""
    sizes = ["--train", "64", "--held-out", "16", "--warm-start", "512"]
    for command in (
        ["-m", "examples.arithmetic.make_data", "--out", str(work / "data"), *sizes],
        ["-m", "examples.arithmetic.make_model", "--out", str(work / "model")],
    ):
        subprocess.run([sys.executable, *command], check=True)
    return work


def configuration(example: Path, **changes) -> Path:
    """A file with a small deterministic run."""
    config = {
        "model": str(example / "model"),
        "run_dir": "",
        "num_steps": NUM_STEPS,
        "deterministic": True,
        "data": {"train": [{"path": str(example / "data" / "train.jsonl")}], "max_prompt_tokens": 96},
        "sampling": {"temperature": 1.0, "max_response_tokens": 48},
        "engine": {"format": "bf16", "max_num_seqs": 64, "kv_cache_bytes": 64 << 20},
        "algorithm": {"prompts_per_step": 4, "group_size": 4, "drop_zero_variance": False, "num_mini_batches": 2},
        "trainer": {
            "dtype": "fp32",
            "max_micro_batch_tokens": 512,
            "parallel": {"tensor": 2},
            "optimizer": {"learning_rate": 1e-3},
        },
        "checkpoint": {"every": 1},
        "evaluation": {"bf16_before_after": False},
        **changes,
    }
    # several runs are configured at a time
    with tempfile.NamedTemporaryFile("w", dir=example, prefix="run-", suffix=".yaml", delete=False) as file:
        yaml.safe_dump(config, file)
    return Path(file.name)


def start(config: Path, run_dir: Path, *overrides: str) -> subprocess.Popen:
    return command("run", str(config), f"run_dir={run_dir}", *overrides)


def command(*arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "launcher", *arguments]
    return popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output[-4000:]
    return output


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(run_dir: Path) -> list[dict]:
    kept = rows(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(NOT_REPEATABLE)} for row in kept]


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.stdout.read()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def run_to_its_end(example: Path) -> Path:
    """The directory of a deterministic run that nothing happened to."""
    run_dir = example / "whole"
    finish(start(configuration(example), run_dir))
    return run_dir


def run_fed_with_changes(example: Path) -> tuple[Path, str]:
    """The directory and the output of an INT8 run at a low temperature that publishes what changed over sockets."""
    run_dir = example / "int8"
    config = configuration(
        example,
        num_steps=2,
        deterministic=False,
        sampling={"temperature": 0.6, "max_response_tokens": 48},
        engine={
            "format": "int8",
            "bf16_first_layers": 0,
            "bf16_last_layers": 1,
            "max_num_seqs": 16,
            "kv_cache_bytes": 64 << 20,
        },
        publish={"delta": True},
        evaluation={
            "sets": {"held_out": {"path": str(example / "data" / "held_out.jsonl"), "max_response_tokens": 32}}
        },
        wandb={"mode": "disabled"},
    )
    return run_dir, finish(start(config, run_dir))


def run_of_experts(example: Path) -> Path:
    """The directory of a run of a mixture of experts, spread over two trainer ranks."""
    model, run_dir = example / "experts", example / "of-experts"
    subprocess.run([sys.executable, "-m", "tests.expert_model", str(example / "model"), str(model)], check=True)
    config = configuration(
        example,
        model=str(model),
        num_steps=2,
        deterministic=False,
        trainer={
            "dtype": "fp32",
            "max_micro_batch_tokens": 512,
            "parallel": {"data": 2, "expert": 2},
            "optimizer": {"learning_rate": 1e-3},
        },
        wandb={"mode": "disabled"},
    )
    finish(start(config, run_dir))
    return run_dir
