"""The example over several epochs, with and without drafts from history: forwards per token, and learning.

`python -m benchmarks.learning.example_epochs --json OUT [--seeds 3] [--warm DIR] [--quick]`: the prompts of the example
are limited to four steps, so each prompt is visited three times. Every seed runs twice from one warm start, with and
without drafts. DIR is the work directory of a quickstart (`data/`, `warm/`); without it a warm start is made first,
which takes six minutes. A run takes about three and a half minutes. The order over the seeds is on, off, off, on, so
slow drifts of the machine affect both alike.

Rows: one per run and epoch. The speed of this small model on a CPU does not show the gain; `benchmarks.rollout` does.
"""

import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.example_run import K3, few_prompts, read_metrics, trained
from benchmarks.harness.paired import Difference, by_seed, check_seeds, goal_in_points
from benchmarks.harness.process_tree import watch
from benchmarks.harness.record import Goal, Row, arguments, write
from benchmarks.harness.record_inputs import quickstart_inputs
from examples.arithmetic.quickstart import HELD_OUT, commands, held_out_accuracy

STEPS_PER_EPOCH = 4
NUM_STEPS = 12
PROMPTS_PER_STEP = 64
MOST_BELOW = 3.0
"""Points of reward and of held-out accuracy that drafts may cost: upper end of the interval over the seeds."""
QUICK_STEPS_PER_EPOCH, QUICK_STEPS, QUICK_PROMPTS = 1, 2, 8
QUICK_KEYS = (f"algorithm.prompts_per_step={QUICK_PROMPTS}", f"evaluation.sets.{HELD_OUT}.limit=32")
QUICK_WARM_STEPS = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Run all seeds and write the record. SystemExit if a command fails."""
    parser = arguments("The example with and without drafts from history, over seeds.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm", type=Path, help="work directory of a quickstart to take data and warm start from")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/history_example"))
    options = parser.parse_args(argv)
    check_seeds(parser, options.seeds)
    warm = options.warm or warm_start(options.work / "warm", quick=options.quick)
    inputs = quickstart_inputs(options.warm)
    rows: list[Row] = []
    for seed in range(1, 1 + (1 if options.quick else options.seeds)):
        for drafts in (True, False) if seed % 2 else (False, True):
            rows += run(warm, options.work, seed=seed, drafts=drafts, quick=options.quick)
            write(options.json, rows=rows, not_measured=["any GPU"], inputs=inputs)
    if not options.quick:
        write(options.json, rows=rows, goals=goals(rows), not_measured=["any GPU"], inputs=inputs)
    return 0


def run(warm: Path, work: Path, *, seed: int, drafts: bool, quick: bool = False) -> Iterator[Row]:
    """Rows of one run, an epoch each."""
    num_steps, of_epoch = (QUICK_STEPS, QUICK_STEPS_PER_EPOCH) if quick else (NUM_STEPS, STEPS_PER_EPOCH)
    run_dir = work / f"seed-{seed}-{'history' if drafts else 'stock'}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    few = few_prompts(warm, work / "few.jsonl", of_epoch * (QUICK_PROMPTS if quick else PROMPTS_PER_STEP))
    command = [
        *(sys.executable, "-m", "launcher", "run", "examples/arithmetic/rl.yaml", f"model={warm / 'warm'}"),
        *(f"run_dir={run_dir}", f"data.train.0.path={few}", f"seed={seed}", f"history.drafts={str(drafts).lower()}"),
        *(f"evaluation.sets.{HELD_OUT}.path={warm / 'data' / 'held_out.jsonl'}", f"num_steps={num_steps}"),
        *(QUICK_KEYS if quick else ()),
    ]
    log = run_dir.with_suffix(".log")
    code, _, _ = watch(command, log=log)
    if code:
        raise SystemExit(f"exit code {code}; the end of {log}:\n{log.read_text(encoding='utf-8')[-3000:]}")
    before, after = held_out_accuracy(run_dir)
    metrics = read_metrics(run_dir)
    for first in range(0, num_steps, of_epoch):
        epoch = metrics[first : first + of_epoch]
        row: dict[str, str | int | float | bool] = {
            "seed": seed,
            "drafts": drafts,
            "epoch": first // of_epoch,
            "reward": statistics.fmean(row["reward/mean"] for row in epoch),
            "response_tokens": statistics.fmean(row["response_length/mean"] for row in epoch),
            "rollout_s": statistics.fmean(row["timing_s/rollout"] for row in epoch),
            **({"k3": statistics.fmean(row[K3] for row in trained(epoch))} if trained(epoch) else {}),
            "held_out_before": before,
            "held_out_after": after,
        }
        for name in _DRAFTING if drafts else ():
            if values := [of_step[f"history/{name}"] for of_step in epoch if f"history/{name}" in of_step]:
                row[name] = statistics.fmean(values)
        yield row


_DRAFTING = (
    "tokens_per_forward",
    "drafted_tokens",
    "accepted_tokens",
    "acceptance_rate",
    "calibration_error",
    "hit_rate",
)


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Goals: more than one token per forward in every later epoch; drafts cost at most `MOST_BELOW` points."""
    later = [float(row["tokens_per_forward"]) for row in rows if row["drafts"] and int(row["epoch"]) > 0]
    reached = [
        Goal(name="tokens per forward after epoch 0", value=min(later), bound=1.02, direction="at least", unit="x")
    ]
    last = max(int(row["epoch"]) for row in rows)
    after = [by_seed(rows, "held_out_after", drafts=drafts, epoch=last) for drafts in (False, True)]
    rewards = [_mean_rewards(rows, drafts=drafts) for drafts in (False, True)]
    return reached + [
        goal_in_points(f"{name}: drafts below none", Difference.between(*values), bound=MOST_BELOW, direction="at most")
        for name, values in (("reward", rewards), ("held-out accuracy", after))
    ]


def _mean_rewards(rows: Sequence[Row], *, drafts: bool) -> dict[int, float]:
    """The mean reward over the epochs with drafts, or without, by seed."""
    epochs = sorted({int(row["epoch"]) for row in rows})
    rewards = [by_seed(rows, "reward", drafts=drafts, epoch=epoch) for epoch in epochs]
    return {seed: statistics.fmean(of_epoch[seed] for of_epoch in rewards) for seed in rewards[0]}


def warm_start(work: Path, *, quick: bool, resume: bool = False) -> Path:
    """Make the example's data and warm start in a directory, which is returned; with `resume` a whole one is kept.

    The directory is `work`; that of a quick one has another name, so that it is never kept for the other.
    """
    work = work.with_name(f"{work.name}-quick") if quick else work
    if resume and (work / "warm" / "config.json").is_file():  # which is written last
        return work
    shutil.rmtree(work, ignore_errors=True)
    for name, command in commands(work, 1, (), warm_steps=QUICK_WARM_STEPS if quick else 0).items():
        if name in ("data", "model", "warm start"):
            subprocess.run([sys.executable, *command], check=True)
    return work


if __name__ == "__main__":
    sys.exit(main())
