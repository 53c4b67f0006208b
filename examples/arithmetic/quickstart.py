"""Runs the whole example through the public commands and says what came of it: data, model, warm start, RL, report.

Every phase is a process of its own, exactly what a user would type; seconds by phase are printed, and the last line is
`held-out accuracy: A -> B` (BF16, greedy). `make quickstart` builds the environment first and passes its seconds on.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

EXAMPLE = Path("examples/arithmetic")
HELD_OUT = "held_out"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all phases; returns the exit code of the first one that fails."""
    parser = argparse.ArgumentParser(description="Run the arithmetic example from data to report.")
    parser.add_argument("--work", type=Path, default=EXAMPLE / "work", help="where everything is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setup-seconds", type=float, default=0.0, help="shown with the other phases")
    parser.add_argument("--warm-steps", type=int, default=0, help="a shorter warm start than that of sft.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="handed to `megatron-rl run`")
    arguments = parser.parse_args(argv)
    seconds = {"set-up": arguments.setup_seconds} if arguments.setup_seconds else {}
    try:
        seconds |= run_phases(arguments.work, arguments.seed, arguments.overrides, warm_steps=arguments.warm_steps)
    except subprocess.CalledProcessError as error:
        print(f"quickstart: `{' '.join(error.cmd)}` ended with exit code {error.returncode}", file=sys.stderr)
        return error.returncode
    print("\n".join(["", "seconds by phase", *(f"  {name:10} {value:7.1f}" for name, value in seconds.items())]))
    print(f"  {'all':10} {sum(seconds.values()):7.1f}")
    print(f"report: {arguments.work / 'run' / 'report.html'}")
    before, after = held_out_accuracy(arguments.work / "run")
    print(f"held-out accuracy: {before:.3f} -> {after:.3f}")
    return 0


def run_phases(work: Path, seed: int, overrides: Sequence[str], *, warm_steps: int = 0) -> dict[str, float]:
    """Runs each phase into `work`, replacing what an earlier quickstart left there; returns seconds by phase.

    Raises `subprocess.CalledProcessError` for the first command that fails.
    """
    for leftover in ("data", "model", "warm", "run"):
        shutil.rmtree(work / leftover, ignore_errors=True)
    seconds = {}
    for name, command in commands(work, seed, overrides, warm_steps=warm_steps).items():
        print(f"\n== {name}: python {' '.join(command)}", flush=True)
        started = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True)
        seconds[name] = time.perf_counter() - started
    return seconds


def commands(work: Path, seed: int, overrides: Sequence[str], *, warm_steps: int = 0) -> dict[str, list[str]]:
    """The command line of each phase, in order, without the interpreter."""
    data, seeded = work / "data", ["--seed", str(seed)]
    return {
        "data": ["-m", "examples.arithmetic.make_data", "--out", str(data), *seeded],
        "model": ["-m", "examples.arithmetic.make_model", "--out", str(work / "model"), *seeded],
        "warm start": [
            *("-m", "launcher", "sft", str(EXAMPLE / "sft.yaml"), f"model={work / 'model'}"),
            *(f"output_dir={work / 'warm'}", f"data.path={data / 'warm_start.jsonl'}"),
            *(f"log_path={work / 'warm_metrics.jsonl'}", f"seed={seed}"),
            *([f"num_steps={warm_steps}"] if warm_steps else []),
        ],
        "rl": [
            *("-m", "launcher", "run", str(EXAMPLE / "rl.yaml"), f"model={work / 'warm'}", f"run_dir={work / 'run'}"),
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
