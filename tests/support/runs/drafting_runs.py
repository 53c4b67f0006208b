"""A whole run that drafts from history, and the end of its history in the middle."""

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

from history.index.segments_dir import SHM
from history.store.snapshot import MANIFEST, read_manifest
from tests.support.deadline import DEADLINE_S
from tests.support.runs.whole_runs import configuration, finish, rows, start, wait_for

DRAFTING = "drafting"
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
        model=str(example / "model"),
        deterministic=False,
        num_steps=NUM_STEPS,
        data={"train": [{"path": str(few)}], "max_prompt_tokens": 96},
        sampling={"temperature": 0.1, "max_response_tokens": 48},
        algorithm={"prompts_per_step": PROMPTS_PER_STEP, "group_size": 4, "drop_zero_variance": False},
        trainer={"dtype": "fp32", "max_micro_batch_tokens": 512, "optimizer": {"learning_rate": 1e-6}},
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
    run_dir = example / DRAFTING
    run = start(drafting(example), run_dir)
    wait_for(lambda: len(rows(run_dir / "metrics.jsonl")) >= KILLED_AFTER, run)
    assert kill_history(run) == 2
    output = finish(run)
    assert "history shard 0 died and was restarted" in output
    assert list(SHM.glob(f"mrl-history-*-{run.pid}")) == []  # other runs may be under way
    return run_dir


@dataclass(frozen=True)
class Damaged:
    """One step more of a run with a damaged snapshot of its history, and a refusal of another tokenizer's."""

    file: str
    """What was damaged."""
    output: str
    last_row: dict
    refusal: int
    """Exit status of the run that was to begin with the other tokenizer's history."""
    refusal_output: str
    refused_dir: Path


def run_with_damaged_history(example: Path) -> Damaged:
    """Goes on with a copy of `run_whose_history_is_killed`."""
    run_dir, config = example / "damaged", drafting(example)
    shutil.copytree(example / DRAFTING, run_dir, symlinks=True)
    folder = run_dir / "checkpoints" / str(NUM_STEPS) / "history"
    name = read_manifest(folder).files[-1].name
    damaged = bytearray((folder / name).read_bytes())
    damaged[-1] ^= 1
    (folder / name).unlink()  # it is linked from other checkpoints
    (folder / name).write_bytes(damaged)
    output = finish(start(config, run_dir, f"num_steps={NUM_STEPS + 1}"))

    foreign, refused_dir = example / "foreign", example / "refused"
    shutil.copytree(run_dir / "checkpoints" / str(NUM_STEPS + 1) / "history", foreign)
    manifest = json.loads((foreign / MANIFEST).read_text())
    (foreign / MANIFEST).write_text(json.dumps({**manifest, "fingerprint": "another"}))
    run = start(config, refused_dir, f"history.warm_start={foreign}")
    refusal_output, _ = run.communicate(timeout=DEADLINE_S)
    last = rows(run_dir / "metrics.jsonl")[-1]
    return Damaged(name, output, last, run.returncode, refusal_output, refused_dir)


def run_that_begins_with_traces(example: Path) -> dict:
    """Metrics of a first step that had the traces of `run_whose_history_is_killed`."""
    run_dir = example / "warm"
    overrides = ["num_steps=1", "sampling.temperature=0.6", f"history.warm_start={example / DRAFTING / 'traces'}"]
    finish(start(drafting(example), run_dir, *overrides))
    (row,) = rows(run_dir / "metrics.jsonl")
    return row
