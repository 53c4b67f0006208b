"""Effect of 8-bit weights, drafts and the planner on the example, alone and together, colocated and disaggregated.

`python -m benchmarks.learning.ablation --json OUT [--warm DIR] [--seeds 3] [--arms NAME ..] [--resume] [--quick]`: the
example's RL once per seed and arm, from one warm start, with two engines on a core each. DIR is a quickstart's work
directory; without it a warm start is made first. There are few prompts, so each is visited several times. A run takes
about three minutes. The order of the arms is reversed with every seed, so slow drifts of the machine affect all arms
alike. Beside OUT, `OUT.reward.svg` and `OUT.seconds.svg` show rewards and seconds per step, means over the seeds.

Rows: one per run, and one per arm with its differences from the arm `bf16, synchronous`, taken seed by seed with 95 %
intervals. The speed of this small model on a CPU shows that the parts work together; it does not show their gain.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.example_run import few_prompts, mismatch_figures, read_metrics, run_example
from benchmarks.harness.paired import Difference, check_seeds
from benchmarks.harness.plots import Series, lines
from benchmarks.harness.record import Goal, Row, arguments, rows_before, write
from benchmarks.harness.record_inputs import quickstart_inputs
from benchmarks.learning.example_epochs import QUICK_KEYS, QUICK_PROMPTS, warm_start
from examples.arithmetic.quickstart import HELD_OUT, held_out_accuracy

PROMPTS_PER_STEP = 64
STEPS_PER_EPOCH, NUM_STEPS = 4, 12
QUICK_STEPS = 3

COMMON = ("engine.num_engines=2", "engine.cpu_cores=1", "wandb.mode=disabled")
BASE = "bf16, synchronous"
INT8 = {"engine.format": "int8"}
DRAFTS = {"history.drafts": "true"}
PLANNER = {"planner.policy": "adaptive", "planner.overlap": "1", "planner.max_staleness": "1"}
APART = {"placement.mode": "disaggregated"}
ARMS: Mapping[str, Mapping[str, str]] = {
    BASE: {},
    "int8": INT8,
    "drafts": DRAFTS,
    "planner": PLANNER,
    "all": {**INT8, **DRAFTS, **PLANNER},
    "bf16, synchronous, disaggregated": APART,
    "all, disaggregated": {**INT8, **DRAFTS, **PLANNER, **APART},
}
_OFF = {
    "engine.format": "bf16",
    "history.drafts": "false",
    "planner.policy": "static",
    "planner.overlap": "0",
    "planner.max_staleness": "0",
    "placement.mode": "colocated",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all arms and write the record. SystemExit if a command fails."""
    parser = arguments("Seconds per step, drafts, mismatch and learning, by the features that are switched on.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm", type=Path, help="work directory of a quickstart to take data and warm start from")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--work", type=Path, default=Path("runs/bench/ablation"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that OUT has")
    options = parser.parse_args(argv)
    check_seeds(parser, options.seeds)
    if BASE not in options.arms:
        parser.error(f"--arms lacks `{BASE}`: the other arms are compared with it; add it")
    warm = options.warm or warm_start(options.work / "warm", quick=options.quick, resume=options.resume)
    inputs = quickstart_inputs(options.warm)
    before = rows_before(options.json, resume=options.resume)
    rows = [row for row in before if row["what"] == "run"]
    done = {(row["seed"], row["arm"]) for row in rows}
    for seed in range(1, 1 + (1 if options.quick else options.seeds)):
        for arm in options.arms if seed % 2 else options.arms[::-1]:
            if (seed, arm) not in done:
                rows.append(run(warm, options.work, seed, arm, quick=options.quick))
                write(options.json, rows=rows, not_measured=["any GPU"], inputs=inputs)
                print(f"seed {seed}, {arm}: {rows[-1]['step_s']} s a step", flush=True)
    if not options.quick:
        all_rows = [*rows, *differences(rows)]
        write(options.json, rows=all_rows, goals=list(goals(all_rows)), not_measured=["any GPU"], inputs=inputs)
    for name, column in (("reward", "reward/mean"), ("seconds", "timing_s/step")):
        picture = _picture(options.work, rows, column, unit=name)
        options.json.with_suffix(f".{name}.svg").write_text(picture, encoding="utf-8")
    return 0


def keys(arm: str) -> list[str]:
    """Configuration keys of an arm; features that it does not name are off."""
    return [*COMMON, *(f"{key}={value}" for key, value in {**_OFF, **ARMS[arm]}.items())]


def run(warm: Path, work: Path, seed: int, arm: str, *, quick: bool = False) -> Row:
    """The row of one run."""
    prompts = few_prompts(warm, work / "few.jsonl", QUICK_PROMPTS if quick else STEPS_PER_EPOCH * PROMPTS_PER_STEP)
    run_dir = _run_dir(work, seed, arm)
    metrics, seconds = run_example(
        warm,
        run_dir,
        [
            *(*keys(arm), f"data.train.0.path={prompts}", f"seed={seed}"),
            *(f"num_steps={QUICK_STEPS if quick else NUM_STEPS}", *(QUICK_KEYS if quick else ())),
            f"evaluation.sets.{HELD_OUT}.path={warm / 'data' / 'held_out.jsonl'}",
        ],
    )
    before, after = held_out_accuracy(run_dir)
    epoch_steps = 1 if quick else STEPS_PER_EPOCH

    def mean(name: str, default: float, rows: Sequence[Mapping[str, float]] = metrics) -> float:
        return round(statistics.fmean(row.get(name, default) for row in rows), 4)

    return {
        "what": "run",
        "seed": seed,
        "arm": arm,
        # mean, since overlap makes the first step longer and the last step shorter
        "step_s": mean("timing_s/step", 0.0),
        "rollout_s": mean("timing_s/rollout", 0.0),
        "train_s": mean("timing_s/train", 0.0),
        "tokens_per_forward": mean("history/tokens_per_forward", 1.0),
        "tokens_per_forward_later": mean("history/tokens_per_forward", 1.0, metrics[epoch_steps:]),
        "bubble": mean("timeline/bubble", 0.0),
        "mean_staleness": mean("batch/mean_staleness", 0.0),
        "max_staleness": max(row["batch/max_staleness"] for row in metrics),
        **mismatch_figures(metrics),
        "reward_last": metrics[-1]["reward/mean"],
        "held_out_before": before,
        "held_out_after": after,
        "seconds": round(seconds, 1),
    }


COMPARED: Mapping[str, Callable[[Row, Row], float]] = {
    "speed": lambda row, base: float(base["step_s"]) / float(row["step_s"]),
    "held_out_points": lambda row, base: 100 * (float(row["held_out_after"]) - float(base["held_out_after"])),
    "k3": lambda row, base: float(row.get("k3_median", 0.0)) - float(base.get("k3_median", 0.0)),
}
"""Comparisons of an arm's row with the base row of the same seed."""


def differences(rows: Sequence[Row]) -> Iterator[Row]:
    """Differences of each arm from the base: means over the seeds that both have, with 95 % intervals."""
    by_run = {(row["seed"], row["arm"]): row for row in rows if row["what"] == "run"}
    seeds = sorted(seed for seed, arm in by_run if arm == BASE)
    for arm in ARMS:
        pairs = [(by_run[seed, arm], by_run[seed, BASE]) for seed in seeds if (seed, arm) in by_run]
        if arm == BASE or len(pairs) < 2:
            continue
        row: dict[str, str | int | float | bool] = {"what": "difference", "arm": arm, "seeds": len(pairs)}
        for name, compare in COMPARED.items():
            difference = Difference.of([compare(*pair) for pair in pairs])
            low, high = difference.interval
            row |= {name: difference.mean, f"{name}_low": low, f"{name}_high": high}
        yield row


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Goals: no arm loses accuracy, and all features together are not slower."""
    for row in rows:
        if row["what"] != "difference":
            continue
        arm, lost, speed = row["arm"], -float(row["held_out_points"]), float(row["speed"])
        yield Goal(name=f"{arm}: held-out lost", value=lost, bound=3.0, direction="at most", unit="points")
        if str(arm).startswith("all"):
            yield Goal(name=f"{arm}: speed", value=speed, bound=1.0, direction="at least", unit="x")


def _picture(work: Path, rows: Sequence[Row], column: str, *, unit: str) -> str:
    """One metric over the steps, by arm, means over the seeds, as SVG."""
    series = []
    for arm in dict.fromkeys(str(row["arm"]) for row in rows):
        runs = [read_metrics(_run_dir(work, int(row["seed"]), arm)) for row in rows if row["arm"] == arm]
        means = [statistics.fmean(step[column] for step in steps) for steps in zip(*runs, strict=True)]
        series.append(Series(label=arm, steps=range(1, len(means) + 1), values=means))
    return lines(f"ablation-{unit}", series, unit=unit)


def _run_dir(work: Path, seed: int, arm: str) -> Path:
    return work / f"seed-{seed}-{arm.replace(', ', '-')}"


if __name__ == "__main__":
    sys.exit(main())
