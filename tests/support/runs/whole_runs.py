"""Whole runs through the command line, as the tests of runs configure, start and read them.

Two tiny models, the example's and a mixture of experts like it, both untrained, and the example's data.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from launcher.run_dir.atomic_files import read_rows
from rollout.transports import shm_files
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import popen

NUM_STEPS = 4
UNINTERRUPTED = "whole"
EXPERTS = "experts"
NOT_REPEATABLE = ("timing_s/", "perf/", "timeline/", "checkpoint/", "time_s")


def make_example(work: Path) -> Path:
    """Data and an untrained model of the arithmetic example, and a mixture of experts; returns `work`."""
    sizes = ["--train", "64", "--held-out", "16", "--warm-start", "512"]
    for command in (
        ["-m", "examples.arithmetic.make_data", "--out", str(work / "data"), *sizes],
        ["-m", "examples.arithmetic.make_model", "--out", str(work / "model")],
        ["-m", "tests.support.runs.expert_model", str(work / "model"), str(work / EXPERTS)],
    ):
        subprocess.run([sys.executable, *command], check=True)
    return work


def configuration(example: Path, **changes) -> Path:
    """A file with a small deterministic run of the mixture, whose experts are spread over two trainer ranks."""
    config = {
        "model": str(example / EXPERTS),
        "run_dir": "",
        "num_steps": NUM_STEPS,
        "deterministic": True,
        "data": {"train": [{"path": str(example / "data" / "train.jsonl")}], "max_prompt_tokens": 96},
        "sampling": {"temperature": 1.0, "max_response_tokens": 48},
        "engine": {"format": "bf16", "max_num_seqs": 64, "kv_cache_bytes": 64 << 20},
        "algorithm": {"prompts_per_step": 4, "group_size": 4, "filter": "none", "num_mini_batches": 2},
        "trainer": {
            "dtype": "fp32",
            "max_micro_batch_tokens": 512,
            "parallel": {"data": 2, "expert": 2},
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


def start(config: Path, run_dir: Path, *overrides: str, launcher: str = "launcher", path: str = "") -> subprocess.Popen:
    return command("run", str(config), f"run_dir={run_dir}", *overrides, launcher=launcher, path=path)


def command(*arguments: str, launcher: str = "launcher", path: str = "") -> subprocess.Popen:
    """`path` is searched for modules before PYTHONPATH."""
    paths = [each for each in (path, os.environ.get("PYTHONPATH", "")) if each]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": ":".join(paths)} if paths else {})}
    line = [sys.executable, "-m", launcher, *arguments]
    return popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output[-4000:]
    return output


def rows(path: Path) -> list[dict]:
    return read_rows(path)


def metrics(run_dir: Path) -> list[dict]:
    steps = rows(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(NOT_REPEATABLE)} for row in steps]


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None or condition(), process.stdout.read()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def run_to_its_end(example: Path) -> Path:
    """The directory of a deterministic run that nothing happened to."""
    run_dir = example / UNINTERRUPTED
    finish(start(configuration(example), run_dir))
    return run_dir


@dataclass(frozen=True)
class Stopped:
    """A run that stopped on request."""

    run_dir: Path
    code: int
    """Exit code."""
    output: str
    status: str
    """`megatron-rl status` after the stop."""


@dataclass(frozen=True)
class Killed:
    """A run of two starts, of which the first was killed (-9)."""

    run_dir: Path
    seed: int
    """Of the point at which it was killed."""
    during_save: bool
    output: str
    """Of the second start."""
    left_behind: set[str]
    """Shared memory of processes that have ended."""


JUMPING_CLOCK = str(Path(__file__).parent / "jumping_clock")
"""On a run's path, somebody sets the clock forth and back all the time."""


def run_killed_once(example: Path) -> Killed:
    """The run of `run_to_its_end` under a jumping clock, killed during a save or soon after a step, and resumed."""
    run_dir, config, before = example / "interrupted", configuration(example), abandoned()
    seed = random.randrange(1 << 30)
    generator = random.Random(seed)
    during_save = generator.choice([True, False])
    launcher = "tests.support.runs.slow_save" if during_save else "launcher"
    process = start(config, run_dir, launcher=launcher, path=JUMPING_CLOCK)
    if during_save:
        saved = generator.choice([1, 2])
        wait_for(lambda: any((run_dir / "checkpoints").glob(f"{saved}.partial")), process)
        time.sleep(generator.uniform(0, 0.1))
    else:
        wait_for(lambda: rows(run_dir / "metrics.jsonl"), process)
        time.sleep(generator.uniform(0, 2.0))
    process.send_signal(signal.SIGKILL)
    process.wait()
    output = finish(start(config, run_dir, "checkpoint.every=0", path=JUMPING_CLOCK))
    return Killed(run_dir, seed, during_save, output, left_behind_since(before))


@dataclass(frozen=True)
class TrainerLost:
    """A run that lost its trainer twice."""

    run_dir: Path
    seed: int
    """Of the point at which a rank was killed."""
    output: str
    left_behind: set[str]
    """Shared memory of processes that have ended."""


HANGING_LOSS = "tests.support.runs.hanging_loss.hanging_loss"
PROGRESS_TIMEOUT_S = 40
"""Within which a rank must make progress."""


def run_whose_trainer_is_lost(example: Path) -> TrainerLost:
    """The run of `run_to_its_end`, of whose trainer a rank is killed (-9) within two seconds after the first step.

    After the restart, a rank loops while it computes a loss.
    """
    run_dir, before = example / "trainer-lost", abandoned()
    calm = yaml.safe_load(configuration(example).read_text(encoding="utf-8"))
    config = configuration(
        example,
        algorithm={**calm["algorithm"], "loss": HANGING_LOSS},
        trainer={**calm["trainer"], "progress_timeout_s": PROGRESS_TIMEOUT_S, "max_restarts": 2},
        checkpoint={"every": 2},
        wandb={"mode": "disabled"},
    )
    seed = random.randrange(1 << 30)
    generator = random.Random(seed)
    process = start(config, run_dir)
    wait_for(lambda: bool(rows(run_dir / "metrics.jsonl")), process)
    time.sleep(generator.uniform(0, 2.0))
    send(process, "ray::TrainerActor", signal.SIGKILL, generator.choice([0, 1]))
    (run_dir / "logs" / "trainer-1.armed").touch()  # from its next process on, the rank hangs
    output = finish(process)
    return TrainerLost(run_dir, seed, output, left_behind_since(before))


def stop(run_dir: Path, process: subprocess.Popen) -> Stopped:
    """Ask a run to stop, wait for its end and ask for its status."""
    finish(command("stop", str(run_dir)))
    output, _ = process.communicate(timeout=DEADLINE_S)
    return Stopped(run_dir, process.returncode, output, finish(command("status", str(run_dir))))


def abandoned() -> set[str]:
    """Names of shared memory whose process has ended."""
    matches = ((path.name, shm_files._NAME.fullmatch(path.name)) for path in shm_files.SHM.iterdir())
    return {name for name, match in matches if match and not Path(f"/proc/{match['pid']}").exists()}


def left_behind_since(before: set[str]) -> set[str]:
    """Abandoned names that were not there before; those that other tests leave for a moment do not count."""
    deadline = time.monotonic() + 10
    while (found := abandoned() - before) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


@dataclass(frozen=True)
class Evaluated:
    """What was made of a run's last checkpoint."""

    weights: Path
    """Exported."""
    rows: list[dict]
    output: str


def run_exported_and_evaluated(example: Path) -> Evaluated:
    """The run of `run_to_its_end`, exported, and the export evaluated greedily and sampled."""
    exported, result, evaluation = example / "exported", example / "result.json", example / "eval.yaml"
    finish(command("export", str(example / UNINTERRUPTED), str(exported)))
    held_out = {"path": str(example / "data" / "held_out.jsonl"), "max_response_tokens": 16}
    sets = {"greedy": held_out, "sampled": {**held_out, "temperature": 1.0, "samples_per_prompt": 3, "limit": 8}}
    evaluation.write_text(yaml.safe_dump({"model": str(exported), "sets": sets, "max_prompt_tokens": 96}))
    output = finish(command("eval", str(evaluation), f"output={result}"))
    return Evaluated(exported / "model.safetensors", json.loads(result.read_text()), output)


def run_warm_start(example: Path) -> list[float]:
    """Losses of eight steps of imitation on two ranks."""
    config, target, log = example / "sft.yaml", example / "warmed-up", example / "warmed-up.jsonl"
    settings = {
        "model": str(example / "model"),
        "output_dir": str(target),
        "num_steps": 8,
        "batch_size": 32,
        "log_path": str(log),
        "data": {"path": str(example / "data" / "warm_start.jsonl"), "max_tokens": 320},
        "trainer": {"dtype": "fp32", "parallel": {"data": 2}, "optimizer": {"learning_rate": 3e-3}},
    }
    config.write_text(yaml.safe_dump(settings))
    finish(command("sft", str(config)))
    return [row["sft/loss"] for row in rows(log)]


HANGS = {"progress_timeout_s": 30, "update_timeout_s": 60}
"""An engine that does nothing for so long is ended."""


def run_ahead(example: Path) -> Path:
    """A run that samples a step ahead, with engines beside the trainer.

    Once vLLM's process inside its engine is frozen, once it is killed, in the middle of a publish.
    """
    run_dir = example / "ahead"
    config = configuration(
        example,
        model=str(example / "model"),
        deterministic=False,
        # three groups at a time, so that the first of a step are begun before the last of the one before are over
        engine={"max_num_seqs": 12, "kv_cache_bytes": 64 << 20, **HANGS},
        algorithm={"prompts_per_step": 4, "group_size": 4, "filter": "none"},
        trainer={"dtype": "fp32", "max_micro_batch_tokens": 512, "optimizer": {"learning_rate": 1e-4}},
        placement={"mode": "disaggregated"},
        planner={"overlap": 1, "max_staleness": 1},
        wandb={"mode": "disabled"},
    )
    process = start(config, run_dir)
    wait_for(lambda: bool(rows(run_dir / "metrics.jsonl")), process)
    send(process, "VLLM::EngineCore", signal.SIGSTOP)
    kill_in_publish(NUM_STEPS, process, "VLLM::EngineCore")
    output = finish(process)
    assert output.count("engine 0 died and is restarted") == 2
    assert re.search(r"engine 0 \(process \d+ on \S+\) (emitted no token|did not answer) for 30 s .*was ended", output)
    (stacks,) = (path.read_text() for path in (run_dir / "logs" / "stacks").glob("*/engine-0-*.txt"))
    actor, *children = stacks.split("=== process ")[1:]
    assert "Current thread 0x" in actor
    assert any(", stopped: VLLM::EngineCore" in child for child in children), stacks
    assert f"weight version {NUM_STEPS} is published again, because an engine died" in output
    return run_dir


def kill_in_publish(version: int, process: subprocess.Popen, title: str) -> None:
    """Kill (-9) the descendants of a run with that title as soon as engines are given that weight version.

    Then the shared memory of a trainer becomes visible, for a tenth of a second. Reading all processes may take as
    long, so the ones to kill are found before.
    """
    targets: list[psutil.Process] = []
    looked_s = 0.0

    def is_visible() -> bool:
        nonlocal targets, looked_s
        matches = (shm_files._NAME.fullmatch(path.name) for path in shm_files.SHM.glob(f"mrl-*-w{version}-r0"))
        if any(match is not None and _is_descendant(int(match["pid"]), process) for match in matches):
            return True
        if time.monotonic() - looked_s > 1.0:
            targets = _descendants(process, title)
            looked_s = time.monotonic()
        return False

    wait_for(is_visible, process)
    assert targets, f"no {title} among the descendants"
    for target in targets:
        target.kill()


def _is_descendant(pid: int, process: subprocess.Popen) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(parent.pid == process.pid for parent in psutil.Process(pid).parents())
    return False


def _descendants(process: subprocess.Popen, title: str) -> list[psutil.Process]:
    found = []
    with suppress(psutil.NoSuchProcess):  # the run has ended
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if (each.cmdline() or [""])[0].startswith(title):
                    found.append(each)
    return found


def send(process: subprocess.Popen, title: str, number: signal.Signals, only: int | None = None) -> None:
    """Send a signal to all descendants with that title, or only to one of them."""
    deadline = time.monotonic() + DEADLINE_S
    while not (targets := _descendants(process, title)):  # one look at all processes may miss some
        assert process.poll() is None, f"no {title} was found before the end:\n{process.stdout.read()[-4000:]}"
        assert time.monotonic() < deadline, f"no {title} among the descendants"
        time.sleep(0.005)
    for target in targets if only is None else [targets[only]]:
        target.send_signal(number)


def run_fed_with_changes(example: Path) -> tuple[Path, str]:
    """The directory and the output of an INT8 run at a low temperature that publishes what changed over sockets.

    Its trainer is cut into two tensor-parallel ranks. It begins with the traces of `run_to_its_end`, which had the same
    first prompts. Most groups have no signal, and others replace them.
    """
    run_dir = example / "int8"
    config = configuration(
        example,
        model=str(example / "model"),
        num_steps=2,
        deterministic=False,
        sampling={"temperature": 0.6, "max_response_tokens": 48},
        trainer={
            "dtype": "fp32",
            "max_micro_batch_tokens": 512,
            "parallel": {"tensor": 2},
            "optimizer": {"learning_rate": 1e-3},
        },
        engine={
            "format": "int8",
            "bf16_first_layers": 0,
            "bf16_last_layers": 1,
            "max_num_seqs": 16,
            "kv_cache_bytes": 64 << 20,
        },
        algorithm={"prompts_per_step": 2, "group_size": 4, "num_mini_batches": 2, "max_refill": 3.0},
        reward={"function": "tests.support.reward_functions.scarce"},
        publish={"delta": True, "transport": "gloo"},
        history={"warm_start": str(example / UNINTERRUPTED / "traces")},
        evaluation={
            "sets": {"held_out": {"path": str(example / "data" / "held_out.jsonl"), "max_response_tokens": 32}}
        },
        wandb={"mode": "disabled"},
    )
    return run_dir, finish(start(config, run_dir))
