"""A whole run that drafts from history, and the end of its history in the middle."""

import os
import signal
from pathlib import Path

import psutil

from history.segments_dir import SHM
from tests.whole_runs import configuration, finish, rows, start, wait_for

NUM_PROMPTS, PROMPTS_PER_STEP = 8, 4
NUM_STEPS = 8
KILLED_AFTER = 4
"""Steps that are recorded when the history's processes are killed."""


def drafting(example: Path, **changes) -> Path:
    """A small run whose epoch is two steps; at a low temperature, so that responses repeat themselves."""
    few = example / "few.jsonl"
    few.write_text("".join((example / "data" / "train.jsonl").read_text().splitlines(keepends=True)[:NUM_PROMPTS]))
    return configuration(
        example,
        deterministic=False,
        num_steps=NUM_STEPS,
        data={"train": [{"path": str(few)}], "max_prompt_tokens": 96},
        sampling={"temperature": 0.3, "max_response_tokens": 48},
        algorithm={"prompts_per_step": PROMPTS_PER_STEP, "group_size": 4, "drop_zero_variance": False},
        trainer={"dtype": "fp32", "max_micro_batch_tokens": 512, "optimizer": {"learning_rate": 1e-4}},
        wandb={"mode": "disabled"},
        **changes,
    )


def kill_history(run) -> int:
    """Kill every process of the history that descends from `run`; returns how many there were."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        if process.cmdline()[:1] and process.cmdline()[0].startswith(("ray::Shard", "ray::Reader")):
            found.append(process)
    for process in found:
        os.kill(process.pid, signal.SIGKILL)
    return len(found)


def run_whose_history_is_killed(example: Path) -> Path:
    """The directory of a run whose history was killed (-9) when its second epoch was over."""
    run_dir = example / "drafting"
    run = start(drafting(example), run_dir)
    wait_for(lambda: len(rows(run_dir / "metrics.jsonl")) >= KILLED_AFTER, run)
    assert kill_history(run) == 2
    output = finish(run)
    assert "history shard 0 died and was started again" in output
    assert list(SHM.glob(f"mrl-history-*-{run.pid}")) == []  # other runs may be under way
    return run_dir
