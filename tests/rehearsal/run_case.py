"""A whole run of two steps: `run_case FORMAT TRANSPORT [key=value ...]`.

Swap space counts as memory here: most of what many processes hold is never touched again. Ray does not end processes
for it.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import psutil
import yaml

from examples.arithmetic import make_data, make_model
from launcher import cli
from tests.rehearsal.stages import stage


def configuration(folder: Path, format: str, transport: str) -> Path:
    config = {
        "model": str(folder / "model"),
        "run_dir": str(folder / "run"),
        "num_steps": 2,
        "data": {"train": [{"path": str(folder / "data" / "train.jsonl")}], "max_prompt_tokens": 96},
        "sampling": {"max_response_tokens": 16},
        "engine": {
            **{"format": format, "bf16_first_layers": 0, "bf16_last_layers": 0, "max_num_seqs": 16},
            **{"kv_cache_bytes": 128 << 20, "vllm": {"enforce_eager": True}},
        },
        "algorithm": {"prompts_per_step": 2, "group_size": 4, "filter": "none"},
        "trainer": {"dtype": "bf16", "max_micro_batch_tokens": 512},
        "publish": {"transport": transport},
        "checkpoint": {"every": 1},
        "evaluation": {
            "sets": {
                "held_out": {"path": str(folder / "data" / "held_out.jsonl"), "max_response_tokens": 16, "limit": 4}
            }
        },
        "wandb": {"mode": "disabled"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def count_swap_space() -> None:
    """Let the checks of a run and Ray take swap space for memory."""
    os.environ.update(RAY_memory_monitor_refresh_ms="0")
    memory = psutil.virtual_memory

    def with_swap_space() -> object:
        found = memory()
        return found._replace(available=found.available + psutil.swap_memory().free)

    psutil.virtual_memory = with_swap_space


def run(command: list[str]) -> None:
    code = cli.main(command)
    assert code == 0, f"exit code {code}"


def main(format: str, transport: str, *overrides: str) -> None:
    count_swap_space()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = ["--train", "64", "--held-out", "16", "--warm-start", "512"]
        stage("data", lambda: make_data.main(["--out", str(folder / "data"), *sizes]))
        stage("model", lambda: make_model.main(["--out", str(folder / "model")]))
        config = str(configuration(folder, format, transport))
        stage("run", lambda: run(["run", config, *overrides]))
        rows = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        stage("two steps are recorded", lambda: [json.loads(rows[number])["step"] for number in (0, 1)])


if __name__ == "__main__":
    main(*sys.argv[1:])
