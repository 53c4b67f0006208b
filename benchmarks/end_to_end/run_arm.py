"""Runs one arm with one seed, and reads seconds and accuracy from the files that it wrote.

Time begins when the arm's process is launched. Every stack saves its weights every ten steps and evaluates nothing.
Afterwards, one program scores the weights of all stacks (`benchmarks.end_to_end.score`). An accuracy has the time at
which its step ended, so no stack pays for an evaluation.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.end_to_end import inputs, peers
from benchmarks.end_to_end.arms import Arm, keys
from benchmarks.end_to_end.changed_engine import SIGN
from benchmarks.end_to_end.model import CONTEXT
from benchmarks.end_to_end.peers.setup import python_of
from benchmarks.end_to_end.peers.task import Settings
from benchmarks.harness.record import Row

RL = Path("benchmarks/end_to_end/rl.yaml")
STEPS_PER_EPOCH = 12
PEER_SETTINGS: Mapping[str, Mapping[str, int]] = {
    "plain_loop": {"threads": 2, "micro_batch_tokens": 8192, "samples_at_once": 32},
    "trl_grpo": {"threads": 2, "micro_batch_tokens": 8192, "samples_at_once": 32},
}
"""What was tuned for each peer; other settings are the same for all stacks.

Tried on development seeds 1000 and 1004, beside these: one thread, micro batches of 4,096 tokens, 8 samples at once.
The plain loop is slower with one thread and as fast with smaller batches. TRL is slower with one thread. With 8 samples
at once TRL's steps are shorter on seed 1000 and longer on seed 1004.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is run."""

    num_steps: int = 60
    save_every: int = 10
    most_tokens: int = 2000
    """Of a response in training."""
    learning_rate: float = 5e-5
    warmup_steps: int = 4


FULL = Size()
QUICK = Size(num_steps=2, save_every=1, most_tokens=64)
UNTIMED = Size(num_steps=1, save_every=1, most_tokens=64)
"""Of the launch of a stack before the first measured one, which reads its files and compiles what it caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an arm runs."""

    warm: Path
    """Directory of the model that every stack starts from."""
    work: Path
    peers: Path
    """Folder of the peers' environments."""


def launch(name: str, arm: Arm, seed: int, place: Place, size: Size) -> tuple[Path, float, float]:
    """Run a stack: its run directory, when it was launched, and the seconds until its process ended.

    Raises:
        SystemExit: the run failed; the message has the end of its output.
    """
    run_dir = place.work / f"seed-{seed}-{re.sub('[^A-Za-z0-9]+', '-', name)}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = (peer_command if arm.peer else product_command)(arm, seed, run_dir, place, size)
    log = run_dir.with_suffix(".log")
    launched = time.time()
    with log.open("wb") as output:
        code = subprocess.call(command, env=environment(arm), stdout=output, stderr=subprocess.STDOUT)
    seconds = time.time() - launched
    if code:
        raise SystemExit(f"{name}, seed {seed}: exit code {code}; the end of {log}:\n{log.read_text()[-3000:]}")
    if arm.change is not None and SIGN not in (run_dir / "logs" / "engine-0.log").read_text(encoding="utf-8"):
        raise SystemExit(f"{name}, seed {seed}: the engine's log has no line {SIGN!r}, so it ran unchanged")
    return run_dir, launched, seconds


def run(name: str, arm: Arm, seed: int, place: Place, size: Size) -> list[Row]:
    """Rows of a run: one with its seconds, and one for each accuracy.

    Raises:
        SystemExit: the run failed; the message has the end of its output.
    """
    run_dir, launched, seconds = launch(name, arm, seed, place, size)
    steps = (read_product if arm.peer is None else read_peer)(run_dir)
    began = steps[0]["time_s"] - steps[0]["step_s"] - launched
    ends = {0: began} | {number: row["time_s"] - launched for number, row in enumerate(steps, start=1)}
    about: Row = {"seed": seed, "arm": name}
    points: list[Row] = [
        {"what": "evaluation", **about, "step": step, "seconds": round(ends[step], 2), "accuracy": round(accuracy, 4)}
        for step, accuracy in sorted(accuracies_of(run_dir, arm, seed, place).items())
    ]
    whole: Row = {
        "what": "run",
        **about,
        "seconds": round(seconds, 1),
        "start_s": round(began, 1),
        "steps_s": round(ends[len(steps)] - began, 1),
        **split(steps),
    }
    return [whole, *points]


def accuracies_of(run_dir: Path, arm: Arm, seed: int, place: Place) -> dict[int, float]:
    """Accuracy by finished steps; the saved weights are removed afterwards. The warm start's is scored once a seed."""
    saved = run_dir / "weights"
    if arm.peer is None:
        _call("benchmarks.end_to_end.exported", [run_dir, saved], log=run_dir.with_suffix(".export.log"))
        shutil.rmtree(run_dir / "checkpoints")
    weights = {int(each.name): each for each in saved.iterdir()}
    first, found = place.warm / f"accuracy-{seed}.json", run_dir / "accuracies.json"
    if not first.is_file():
        weights[0] = place.warm
    _, held_out = inputs.prompts_of(place.work, seed)
    _call(
        "benchmarks.end_to_end.score",
        [*("--model", place.warm, "--held-out", held_out, "--seed", seed, "--out", found)]
        + [f"{step}={directory}" for step, directory in sorted(weights.items())],
        log=run_dir.with_suffix(".score.log"),
    )
    shutil.rmtree(saved)
    accuracies = json.loads(found.read_text(encoding="utf-8"))
    if not first.is_file():
        first.write_text(json.dumps({"0": accuracies["0"]}) + "\n", encoding="utf-8")
    accuracies |= json.loads(first.read_text(encoding="utf-8"))
    return {int(step): float(value) for step, value in accuracies.items()}


def _call(module: str, arguments: Sequence[object], *, log: Path) -> None:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with log.open("wb") as output:
        code = subprocess.call(command, stdout=output, stderr=subprocess.STDOUT)
    if code:
        raise SystemExit(f"{module}: exit code {code}; the end of {log}:\n{log.read_text()[-3000:]}")


def environment(arm: Arm) -> dict[str, str]:
    """Variables of the process: threads of a peer, which has all cores; this project's processes set their own."""
    threads = 1 if arm.peer is None else PEER_SETTINGS[arm.peer]["threads"]
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def product_command(arm: Arm, seed: int, run_dir: Path, place: Place, size: Size) -> list[str]:
    """The command line of an arm of this project."""
    train, _ = inputs.prompts_of(place.work, seed)
    program = ["launcher"] if arm.change is None else ["benchmarks.end_to_end.changed_engine", arm.change]
    return [
        *(sys.executable, "-m", *program, "run", str(RL), f"model={place.warm}", f"run_dir={run_dir}", f"seed={seed}"),
        *(f"data.train.0.path={train}", f"num_steps={size.num_steps}", *keys(arm)),
        f"sampling.max_response_tokens={size.most_tokens}",
        f"trainer.optimizer.learning_rate={size.learning_rate}",
        f"trainer.optimizer.warmup_steps={size.warmup_steps}",
        f"checkpoint.every={size.save_every}",
    ]


def peer_command(arm: Arm, seed: int, run_dir: Path, place: Place, size: Size) -> list[str]:
    """The command line of a peer; its settings are written beside its results."""
    assert arm.peer is not None
    train, _ = inputs.prompts_of(place.work, seed)
    settings = Settings(
        model=str(place.warm.resolve()),
        train=str(train.resolve()),
        out=str(run_dir.resolve()),
        seed=seed,
        num_steps=size.num_steps,
        prompts_per_step=4,
        group_size=8,
        most_tokens=size.most_tokens,
        save_every=size.save_every,
        learning_rate=size.learning_rate,
        warmup_steps=size.warmup_steps,
        context=CONTEXT,
        most_requests=256,
        kv_cache_bytes=1 << 29,
        **PEER_SETTINGS[arm.peer],
    )
    settings.write(run_dir / "settings.json")
    program = ["-m", f"{peers.__name__}.{arm.peer}", str(run_dir / "settings.json")]
    return [str(python_of(place.peers, arm.peer)), *program]


def read_product(run_dir: Path) -> list[dict[str, float]]:
    """Metrics of the steps of a run of this project, under the names of `split`."""
    names = {
        "time_s": "time_s",
        "step_s": "timing_s/step",
        "rollout_s": "timing_s/rollout",
        "train_s": "timing_s/train",
        "publish_s": "timing_s/publish",
        "reward": "reward/mean",
        "tokens": "response_length/mean",
        "tokens_per_forward": "history/tokens_per_forward",
        "idle": "timeline/idle_share",
        "mean_staleness": "batch/mean_staleness",
    }
    return [
        {short: float(row[name]) for short, name in names.items() if name in row}
        for row in _read(run_dir / "metrics.jsonl")
    ]


def read_peer(run_dir: Path) -> list[dict[str, float]]:
    """The same of a peer's run."""
    return [{name: float(value) for name, value in row.items()} for row in _read(run_dir / "metrics.jsonl")]


def split(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the steps; of tokens per forward also over the first epoch and over later ones."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(key for row in steps for key in row if key not in ("step", "time_s")):
        found[name] = _mean(steps, name)
    if "tokens_per_forward" in found:
        found["tokens_per_forward_first"] = _mean(steps[:STEPS_PER_EPOCH], "tokens_per_forward")
        found["tokens_per_forward_later"] = _mean(steps[STEPS_PER_EPOCH:] or steps, "tokens_per_forward")
    if "rollout_s" in found:
        found["rollout_share"] = round(found["rollout_s"] / found["step_s"], 4)
    return found


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return round(statistics.fmean(row[name] for row in steps if name in row), 4)


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
