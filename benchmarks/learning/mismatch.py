"""Effect of each weight format on learning, with and without truncated importance sampling, over seeds.

`python -m benchmarks.learning.mismatch --json OUT [--warm DIR] [--seeds 3] [--formats bf16 int8 ..] [--resume]
[--quick]`: the example's RL once per seed, format and correction, from one warm start. DIR is a quickstart's work
directory; without it a warm start is made first. The format `3 bits` is a positive control that must hurt learning
without correction (`benchmarks.learning.coarse_codes`). A run takes about five minutes. OUT is written after each run,
and `--resume` continues it. Beside OUT are three pictures of means over seeds: `OUT.k3.svg` and `OUT.ess.svg` for the
runs with correction, and `OUT.reward.svg` for BF16 and the control with and without correction.

Rows: one per run, with k3 and effective sample size between sampler and trainer (1 without correction), and held-out
accuracy in BF16 before and after. Fields `*_by_step` hold one number per step that trained, separated by blanks.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.example_run import ESS, K3, mismatch_figures, run_example, trained
from benchmarks.harness.paired import Difference, by_seed, check_seeds, goal_in_points
from benchmarks.harness.plots import Series, lines
from benchmarks.harness.record import Goal, Row, arguments, rows_before, write
from benchmarks.harness.record_inputs import quickstart_inputs
from benchmarks.learning.example_epochs import warm_start
from examples.arithmetic.quickstart import HELD_OUT, held_out_accuracy

FORMATS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("engine.format=bf16",),
    "int8": ("engine.format=int8",),
    "fp8_channel": ("engine.format=fp8_channel",),
    "fp8_block": ("engine.format=fp8_block",),
    "3 bits": (
        "engine.format=int8",
        "algorithm.loss=benchmarks.learning.coarse_codes.clipped_surrogate",
        # the probe includes the rounding of codes, and would refuse codes as coarse as these
        "engine.probe_max_logprob_gap={int8: 2}",
    ),
}
CORRECTIONS = ("tis_token", "none")
QUICK = ("num_steps=2", "algorithm.prompts_per_step=8", f"evaluation.sets.{HELD_OUT}.limit=32")
CONTROL = "3 bits"
MOST_LOST = 3.0
"""Points of held-out accuracy that a format may cost with correction: upper end of the interval over the seeds."""
LEAST_EFFECT = 3.0
"""Points that the control must cost without correction, and regain with it: lower end of the interval."""
BY_STEP = {"k3": K3, "ess": ESS, "reward": "reward/mean"}
"""Metrics that the rows hold for each step."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and write the record. SystemExit if a command fails."""
    parser = arguments("k3, effective sample size and held-out accuracy by weight format and correction.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm", type=Path, help="work directory of a quickstart to take data and warm start from")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--work", type=Path, default=Path("runs/bench/mismatch"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that OUT has")
    options = parser.parse_args(argv)
    check_seeds(parser, options.seeds)
    warm = options.warm or warm_start(options.work / "warm", quick=options.quick, resume=options.resume)
    inputs = quickstart_inputs(options.warm)
    rows = rows_before(options.json, resume=options.resume)
    done = {(row["seed"], row["format"], row["correction"]) for row in rows}
    for seed in range(1, 1 + (1 if options.quick else options.seeds)):
        for name in options.formats[:1] if options.quick else options.formats:
            for correction in CORRECTIONS:
                if (seed, name, correction) not in done:
                    rows.append(run(warm, options.work, seed, name, correction, quick=options.quick))
                    write(options.json, rows=rows, not_measured=["any GPU", "runs that have no row yet"], inputs=inputs)
    reached = [] if options.quick else goals(rows)
    write(options.json, rows=rows, goals=reached, not_measured=["any GPU"], inputs=inputs)
    for name in BY_STEP:
        options.json.with_suffix(f".{name}.svg").write_text(picture(rows, name), encoding="utf-8")
    return 0


def run(warm: Path, work: Path, seed: int, name: str, correction: str, *, quick: bool = False) -> Row:
    """The row of one run."""
    run_dir = _run_dir(work, seed, name, correction)
    keys = [
        *(f"seed={seed}", f"evaluation.sets.{HELD_OUT}.path={warm / 'data' / 'held_out.jsonl'}", "wandb.mode=disabled"),
        *(*FORMATS[name], f"algorithm.correction.mode={correction}", *(QUICK if quick else ())),
    ]
    metrics, seconds = run_example(warm, run_dir, keys)
    before, after = held_out_accuracy(run_dir)
    return {
        "seed": seed,
        "format": name,
        "correction": correction,
        **mismatch_figures(metrics),
        **{f"{name}_by_step": _by_step(metrics, metric) for name, metric in BY_STEP.items()},
        "sqnr_db_min": min((row.get("publish/sqnr_db_min", 300.0) for row in metrics), default=300.0),
        "reward_last": metrics[-1]["reward/mean"],
        "held_out_before": before,
        "held_out_after": after,
        "seconds": round(seconds, 1),
    }


def _by_step(metrics: Sequence[dict[str, float]], name: str) -> str:
    steps = trained(metrics)
    return " ".join(f"{row.get(ESS, 1.0) if name == ESS else row[name]:.4g}" for row in steps)


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Goals: 8-bit formats learn as BF16 does; the control loses accuracy without correction and regains it with it."""

    def lost(better: tuple[str, str], worse: tuple[str, str]) -> Difference | None:
        """By how much the second format and correction end below the first; None without runs of both."""
        sides = [
            by_seed(rows, "held_out_after", format=name, correction=correction) for name, correction in (better, worse)
        ]
        return Difference.between(*sides) if all(sides) else None

    bf16, control = ("bf16", "tis_token"), (CONTROL, "none")
    harmless = {
        f"{name} with TIS below bf16, held-out": lost(bf16, (name, "tis_token"))
        for name in ("int8", "fp8_channel", "fp8_block")
    }
    harmful = {
        f"{CONTROL} hurts without TIS, held-out": lost(bf16, control),
        f"{CONTROL} is helped by TIS, held-out": lost((CONTROL, "tis_token"), control),
    }
    return [
        *(goal_in_points(name, of, bound=MOST_LOST, direction="at most") for name, of in harmless.items() if of),
        *(goal_in_points(name, of, bound=LEAST_EFFECT, direction="at least") for name, of in harmful.items() if of),
    ]


def picture(rows: Sequence[Row], name: str) -> str:
    """One of `BY_STEP` over the steps that trained in every seed, means over seeds, as SVG."""
    runs: dict[str, list[list[float]]] = {}
    for row in rows:
        with_correction = row["correction"] != "none"
        if name == "reward" and row["format"] in ("bf16", CONTROL):
            label = f"{row['format']}, {'with' if with_correction else 'without'} TIS"
        elif name != "reward" and with_correction:
            label = str(row["format"])
        else:
            continue
        runs.setdefault(label, []).append([float(value) for value in str(row[f"{name}_by_step"]).split()])
    series = [
        Series(label=label, steps=range(1, 1 + len(means)), values=[max(mean, 1e-8) for mean in means])
        for label, of_label in runs.items()
        if (means := [statistics.fmean(of_step) for of_step in zip(*of_label, strict=False)])
    ]
    return lines(f"mismatch-{name}", series, unit=name, log=name == "k3")


def _run_dir(work: Path, seed: int, name: str, correction: str) -> Path:
    return work / f"seed-{seed}-{name.replace(' ', '-')}-{correction}"


if __name__ == "__main__":
    sys.exit(main())
