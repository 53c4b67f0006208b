"""A whole run that drafts from history and samples ahead: its history ends in the middle, and it stops on request."""

import os
import signal
from pathlib import Path

import psutil

from history.index.segments_dir import SHM
from tests.support.runs.whole_runs import Stopped, configuration, rows, start, stop, wait_for

NUM_PROMPTS, PROMPTS_PER_STEP = 8, 4
NUM_STEPS = 50
KILLED_AFTER, STOPPED_AFTER = 4, 7
"""Steps that are recorded when the history's processes are killed, and when the run is asked to stop."""


def drafting(example: Path) -> Path:
    """A small run whose epoch is two steps; at a low temperature, so that responses repeat themselves."""
    few = example / "few.jsonl"
    few.write_text("".join((example / "data" / "train.jsonl").read_text().splitlines(keepends=True)[:NUM_PROMPTS]))
    return configuration(
        example,
        model=str(example / "model"),
        deterministic=False,
        num_steps=NUM_STEPS,
        data={"train": [{"path": str(few)}], "max_prompt_tokens": 96},
        sampling={"temperature": 0.1, "max_response_tokens": 48},
        algorithm={"prompts_per_step": PROMPTS_PER_STEP, "group_size": 4, "filter": "none"},
        trainer={"dtype": "fp32", "max_micro_batch_tokens": 512, "optimizer": {"learning_rate": 1e-6}},
        planner={"overlap": 1, "max_staleness": 1},
        wandb={"mode": "disabled"},
    )


def kill_history(run) -> int:
    """Kill every process of the history that descends from `run`; returns how many there were."""
    history_processes = []
    for process in psutil.Process(run.pid).children(recursive=True):
        if process.cmdline()[:1] and process.cmdline()[0].startswith(("ray::Shard", "ray::Reader")):
            history_processes.append(process)
    for process in history_processes:
        os.kill(process.pid, signal.SIGKILL)
    return len(history_processes)


def run_whose_history_is_killed(example: Path) -> Stopped:
    """A run whose history was killed (-9) when its second epoch was over, and that was asked to stop in its fourth."""
    run_dir = example / "drafting"
    run = start(drafting(example), run_dir)
    wait_for(lambda: len(rows(run_dir / "metrics.jsonl")) >= KILLED_AFTER, run)
    assert kill_history(run) == 2
    wait_for(lambda: len(rows(run_dir / "metrics.jsonl")) >= STOPPED_AFTER, run)
    stopped = stop(run_dir, run)
    assert "history shard 0 died and was restarted" in stopped.output
    assert list(SHM.glob(f"mrl-history-*-{run.pid}-*")) == []  # other runs may be under way
    return stopped
