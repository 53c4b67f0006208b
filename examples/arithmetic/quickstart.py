"""Runs the whole example through the public commands and says what came of it: data, model, warm start, RL, report.

It asks before it works: the machine first, then a dry run of both stages as soon as data and an untrained model are
there. Every phase is a process of its own, exactly what a user would type; a phase that fails says so itself. Seconds
by phase are printed, and the last line is `held-out accuracy: A -> B` (BF16, greedy). `make quickstart` builds the
environment first and passes its seconds on. Other examples use the same phases (`examples.code.quickstart`).
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.checks.preflight import Check, machine_checks
from launcher.endings.conclusion import termination_raises
from launcher.errors import Terminated

EXAMPLE = Path("examples/arithmetic")
HELD_OUT = "held_out"


def main(
    argv: Sequence[str] | None = None,
    *,
    example: Path = EXAMPLE,
    checks: Callable[[Path], Sequence[Check]] = machine_checks,
) -> int:
    """Runs all phases; returns the exit code of the first one that fails.

    Args:
        argv: the command line without the program.
        example: folder with `make_data.py`, `sft.yaml` and `rl.yaml`.
        checks: checks of the machine, given the folder to which everything is written.
    """
    parser = argparse.ArgumentParser(description=f"Run the example {example.name} from data to report.")
    parser.add_argument("--work", type=Path, default=example / "work", help="where everything is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setup-seconds", type=float, default=0.0, help="shown with the other phases")
    parser.add_argument("--warm-steps", type=int, default=0, help="a shorter warm start than that of sft.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="handed to `megatron-rl run`")
    arguments = parser.parse_args(argv)
    seconds = {"set-up": arguments.setup_seconds} if arguments.setup_seconds else {}
    if not machine_is_fit(checks(arguments.work)):
        return 2
    phases = commands(
        arguments.work, arguments.seed, arguments.overrides, warm_steps=arguments.warm_steps, example=example
    )
    try:
        with termination_raises():
            seconds |= run_phases(arguments.work, phases)
    except PhaseFailedError as error:
        print(f"quickstart: the phase `{error.phase}` ended with exit code {error.code}", file=sys.stderr)
        return error.code
    print("\n".join(["", "seconds by phase", *(f"  {name:10} {value:7.1f}" for name, value in seconds.items())]))
    print(f"  {'all':10} {sum(seconds.values()):7.1f}")
    print(f"report: {arguments.work / 'run' / 'report.html'}")
    before, after = held_out_accuracy(arguments.work / "run")
    print(f"held-out accuracy: {before:.3f} -> {after:.3f}")
    return 0


class PhaseFailedError(Exception):
    """A phase ended with another exit code than 0, and has said why."""

    def __init__(self, phase: str, code: int) -> None:
        super().__init__(phase, code)
        self.phase = phase
        self.code = code


def machine_is_fit(checks: Sequence[Check]) -> bool:
    """Print a line per check of the machine; whether all pass."""
    print("\n".join(["== machine", *map(str, checks)]), flush=True)
    wrong = [check for check in checks if check.problem]
    for check in wrong:
        print(f"quickstart: {check.name}: {check.value}; {check.problem}", file=sys.stderr)
    return not wrong


def run_phases(work: Path, phases: Mapping[str, list[str]]) -> dict[str, float]:
    """Run each phase into `work`, replacing what an earlier quickstart left there; returns seconds by phase.

    Raises `PhaseFailedError` for the first command that fails.
    """
    for leftover in ("data", "model", "warm", "run"):
        shutil.rmtree(work / leftover, ignore_errors=True)
    seconds = {}
    for name, command in phases.items():
        print(f"\n== {name}: python {' '.join(command)}", flush=True)
        started = time.perf_counter()
        code = run_command(command)
        seconds[name] = time.perf_counter() - started
        if code:
            raise PhaseFailedError(name, code)
        print(f"-- {name}: {seconds[name]:.1f} s", flush=True)
        if name == "model":
            seconds["dry runs"] = run_dry(work, phases)
    return seconds


def run_dry(work: Path, phases: Mapping[str, list[str]]) -> float:
    """Have both stages judge configuration, data, model and memory; returns the seconds that it took.

    The warm model is not there yet; the untrained one has its shapes. Raises `PhaseFailedError` if one refuses.
    """
    started = time.perf_counter()
    print("\n== dry runs", flush=True)
    for name in ("warm start", "rl"):
        warm, untrained = f"model={work / 'warm'}", f"model={work / 'model'}"
        command = [untrained if word == warm else word for word in phases[name]]
        done = subprocess.run([sys.executable, *command, "--dry-run"], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise PhaseFailedError(f"dry run of {name}", done.returncode)
        memory = " ".join(done.stdout.splitlines()[-1].split()).removeprefix("sum ")
        print(f"  {name:14} passes every check; memory: {memory}", flush=True)
    seconds = time.perf_counter() - started
    print(f"-- dry runs: {seconds:.1f} s", flush=True)
    return seconds


def run_command(command: Sequence[str]) -> int:
    """Run a phase to its end and return its exit code.

    A phase ends its own processes when it is interrupted or terminated, and is waited for.
    """
    process = subprocess.Popen([sys.executable, *command])
    try:
        return process.wait()
    except KeyboardInterrupt:  # the phase had it from the terminal, too
        process.wait()
        return 130
    except Terminated:
        process.terminate()
        process.wait()
        return 143


def commands(
    work: Path, seed: int, overrides: Sequence[str], *, warm_steps: int = 0, example: Path = EXAMPLE
) -> dict[str, list[str]]:
    """The command line of each phase, in order, without the interpreter."""
    data, seeded = work / "data", ["--seed", str(seed)]
    return {
        "data": ["-m", f"examples.{example.name}.make_data", "--out", str(data), *seeded],
        "model": ["-m", "examples.arithmetic.make_model", "--out", str(work / "model"), *seeded],
        "warm start": [
            *("-m", "launcher", "sft", str(example / "sft.yaml"), f"model={work / 'model'}"),
            *(f"output_dir={work / 'warm'}", f"data.path={data / 'warm_start.jsonl'}"),
            *(f"log_path={work / 'warm_metrics.jsonl'}", f"seed={seed}"),
            *([f"num_steps={warm_steps}"] if warm_steps else []),
        ],
        "rl": [
            *("-m", "launcher", "run", str(example / "rl.yaml"), f"model={work / 'warm'}", f"run_dir={work / 'run'}"),
            *(f"data.train.0.path={data / 'train.jsonl'}", f"seed={seed}"),
            *(f"evaluation.sets.{HELD_OUT}.path={data / 'held_out.jsonl'}", *overrides),
        ],
        "report": ["-m", "launcher.report", str(work / "run")],
    }


def held_out_accuracy(run_dir: Path) -> tuple[float, float]:
    """First and last BF16 accuracy on the held-out problems, as the run recorded them."""
    lines = (run_dir / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    whole = [row for row in rows if (row["set_name"], row["data_source"], row["format"]) == (HELD_OUT, "all", "bf16")]
    ordered = sorted(whole, key=lambda row: row["step"])
    return ordered[0]["average"], ordered[-1]["average"]


if __name__ == "__main__":
    sys.exit(main())
