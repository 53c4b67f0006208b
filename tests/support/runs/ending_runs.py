"""Commands that end other than well, as a person would start them, with real processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from tests.support.runs.background import popen
from tests.support.runs.whole_runs import DEADLINE_S

_ENDS_WITHIN_S = 600.0
"""Each of these commands takes seconds."""
_RAYLET = "raylet/raylet"
"""In the title of the process that is there while Ray itself starts."""


@dataclass(frozen=True)
class Ended:
    """What a command left when it had ended."""

    code: int
    error: str
    """Standard error."""
    log: Path
    """Where the full traceback should be."""
    orphans: list[str]
    """Processes that it started and that are still there."""


def run_to_other_ends(example: Path) -> dict[str, Ended]:
    """A command for each way to end that needs no engine in 8 bits."""
    return {
        "import": _end(_evaluation(example, "import", "tests.support.runs.unimportable_reward.compute_score")),
        "every sample": _end(_evaluation(example, "every", "tests.support.reward_functions.broken")),
        "disk": _end(_warm_start(example, "disk", log_to="/dev/full")),
        "defect": _end(_warm_start(example, "defect", launcher="tests.support.runs.defective")),
        "interrupted": _end(_warm_start(example, "interrupted"), signal.SIGINT, beside="ray::Trainer"),
        "terminated early": _end(_warm_start(example, "terminated-early"), signal.SIGTERM, beside=_RAYLET),
    }


def _evaluation(example: Path, name: str, function: str) -> tuple[subprocess.Popen[str], Path]:
    held_out = {"path": str(example / "data" / "held_out.jsonl"), "max_response_tokens": 8}
    output = example / f"ended-{name}.json"
    settings = {
        "model": str(example / "model"),
        "sets": {"held_out": {**held_out, "temperature": 1.0, "samples_per_prompt": 2}},
        "max_prompt_tokens": 96,
        "engine": {"max_num_seqs": 32, "kv_cache_bytes": 64 << 20},
        "reward": {"function": function},
        "output": str(output),
    }
    return _start(example, name, "eval", settings), output


def _warm_start(
    example: Path, name: str, *, log_to: str = "", launcher: str = "launcher"
) -> tuple[subprocess.Popen[str], Path]:
    output = example / f"ended-{name}.jsonl"
    if log_to:
        output.symlink_to(log_to)
    settings = {
        "model": str(example / "model"),
        "output_dir": str(example / f"ended-{name}"),
        "num_steps": 2,
        "batch_size": 16,
        "log_path": str(output),
        "data": {"path": str(example / "data" / "warm_start.jsonl"), "max_tokens": 320},
        "trainer": {"dtype": "fp32"},
    }
    return _start(example, name, "sft", settings, launcher=launcher), output


def _start(
    example: Path, name: str, command: str, settings: dict[str, object], *, launcher: str = "launcher"
) -> subprocess.Popen[str]:
    config = example / f"ended-{name}.yaml"
    config.write_text(yaml.safe_dump(settings))
    return popen(
        [sys.executable, "-m", launcher, command, str(config)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # what runs the tests in the background may ignore Ctrl-C, and its children would, too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,  # so that Ctrl-C reaches the whole group, as on a terminal, and not the tests
    )


def _end(begun: tuple[subprocess.Popen[str], Path], number: signal.Signals | None = None, *, beside: str = "") -> Ended:
    """Wait for the end; with a signal, send it as soon as the command has a process whose title has `beside` in it."""
    process, output = begun
    deadline = time.monotonic() + _ENDS_WITHIN_S
    if number is not None:
        while process.poll() is None and not any(beside in title for title in map(_title, _children(process))):
            assert time.monotonic() < deadline, f"no process named {beside}:\n{_end_hung(process)}"
            time.sleep(0.1)
        started = _children(process)
        if process.poll() is None:
            os.killpg(process.pid, number) if number is signal.SIGINT else process.send_signal(number)
    else:
        started = []
    try:
        _, error = process.communicate(timeout=_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{process.args} does not end:\n{_end_hung(process)}") from None
    _, alive = psutil.wait_procs(started, timeout=20)
    return Ended(
        process.returncode, error, output.with_name(f"{output.name}.log"), [_title(process) for process in alive]
    )


def _end_hung(process: subprocess.Popen[str]) -> str:
    """Kill a command that hangs, and what holds its output; returns all stacks, and what the command has written."""
    running = [psutil.Process(process.pid), *_children(process)] if process.poll() is None else []
    family = {each.pid: each for each in [*running, *_holders(process)]}
    stacks = [f"exit code {process.poll()}"]
    for each in reversed(family.values()):  # the command itself last: of a long report the end is what is read
        command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid", str(each.pid)]
        dumped = subprocess.run(command, capture_output=True, text=True)
        stacks.append(f"{each.pid} {_title(each)}\n{dumped.stdout or dumped.stderr[:200]}")
    for each in family.values():
        with suppress(psutil.NoSuchProcess):
            each.kill()
    _, error = process.communicate(timeout=DEADLINE_S)
    return "\n".join([*stacks, error])


def _holders(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Other processes that hold the pipes to which a command writes; its output has no end before they end."""
    pipes = {
        f"pipe:[{os.fstat(pipe.fileno()).st_ino}]" for pipe in (process.stdout, process.stderr) if pipe is not None
    }
    found = []
    for each in psutil.process_iter():
        with suppress(OSError):
            links = {str(path.readlink()) for path in Path(f"/proc/{each.pid}/fd").iterdir()}
            if each.pid != os.getpid() and links & pipes:
                found.append(each)
    return found


def _children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""
