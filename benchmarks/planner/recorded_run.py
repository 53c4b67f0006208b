"""Makes a run whose traces other benchmarks replay, and writes the commands that reproduce it into its directory.

`python -m benchmarks.planner.recorded_run --warm WORK --out RUN [--prompts 256] [--steps 24] [--seed 23] [key=value
..]`: the example's RL in BF16, from the warm start of the quickstart in WORK. It has few prompts, so each prompt is
visited several times. Use RUN with `benchmarks.planner.real_engines --run RUN` and `benchmarks.drafting --traces
RUN/traces`; their records name this command.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.example_run import few_prompts, run_example
from benchmarks.harness.record_file import Input
from benchmarks.harness.record_inputs import quickstart_inputs, shown_path, write_inputs
from examples.arithmetic.quickstart import HELD_OUT


def main(argv: Sequence[str] | None = None) -> int:
    """Make the run. SystemExit with the end of its output if it fails."""
    parser = argparse.ArgumentParser(description="Makes a run of the example whose traces other benchmarks replay.")
    parser.add_argument("--warm", type=Path, required=True, help="work directory of a quickstart")
    parser.add_argument("--out", type=Path, required=True, help="run directory; existing files are removed")
    parser.add_argument(
        "--prompts", type=int, default=256, help="number of prompts, from the start of the training data"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="passed to `megatron-rl run`")
    options = parser.parse_args(argv)
    prompts = few_prompts(options.warm, options.out.with_suffix(".prompts.jsonl"), options.prompts)
    run_example(options.warm, options.out, keys(options, prompts))
    write_inputs(options.out, [made(options), *quickstart_inputs(options.warm)])
    return 0


def keys(options: argparse.Namespace, prompts: Path) -> list[str]:
    """Configuration of the run as `key=value`; overrides come last and take precedence."""
    return [
        *("engine.format=bf16", "wandb.mode=disabled", f"num_steps={options.steps}", f"seed={options.seed}"),
        f"data.train.0.path={prompts}",
        f"evaluation.sets.{HELD_OUT}.path={options.warm / 'data' / 'held_out.jsonl'}",
        *options.overrides,
    ]


def made(options: argparse.Namespace) -> Input:
    """The run as an input of another benchmark's record."""
    numbers = f"--prompts {options.prompts} --steps {options.steps} --seed {options.seed}"
    places = f"--warm {shown_path(options.warm)} --out {shown_path(options.out)}"
    command = " ".join([f"python -m benchmarks.planner.recorded_run {places} {numbers}", *options.overrides])
    return Input(path=shown_path(options.out), command=command)


if __name__ == "__main__":
    sys.exit(main())
