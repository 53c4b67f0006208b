"""The guard on the example with coarse codes: does it bring accuracy back, at what cost, and is it quiet otherwise?

`python -m benchmarks.learning.guard --json OUT [--warm DIR] [--seeds 3] [--healthy-steps 200] [--resume] [--quick]`:
the example's RL once per seed and case, from one warm start. There are no importance weights, so the guard is alone.
The control is INT8 codes rounded to 3 bits (`benchmarks.learning.coarse_codes`), which loses accuracy without
correction. DIR is a quickstart's work directory; without it a warm start is made first. A run takes five to ten
minutes; an action on formats starts engines and trainer again. At the end a healthy INT8 run of small steps has the
guard's default rules. OUT is written after each run, and `--resume` continues it.

The example has 14 steps, so its guard acts after two bad steps and never goes back. Without importance weights there
is no cap to tighten, and the example samples nothing ahead, so the ladder is: one layer in BF16, two layers, all.

Rows: one per run, with k3 by cause, its actions, starts of its engines, and held-out accuracy in BF16 before and after.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.harness.example_run import k3_parts, mismatch_figures, run_example
from benchmarks.harness.paired import Difference, by_seed, check_seeds, goal_in_points
from benchmarks.harness.record import Goal, Row, arguments, rows_before, write
from benchmarks.harness.record_inputs import quickstart_inputs
from benchmarks.learning.example_epochs import warm_start
from benchmarks.learning.mismatch import CONTROL, FORMATS, LEAST_EFFECT, MOST_LOST, QUICK
from examples.arithmetic.quickstart import HELD_OUT, held_out_accuracy

RULES = ("algorithm.correction.mode=none", "algorithm.guard.patience=2", "algorithm.guard.recover_after=100")
CASES: Mapping[str, tuple[str, ...]] = {
    "bf16, off": (*FORMATS["bf16"], *RULES),
    "3 bits, off": (*FORMATS[CONTROL], *RULES),
    "3 bits, advise": (*FORMATS[CONTROL], *RULES, "algorithm.guard.mode=advise"),
    "3 bits, act": (*FORMATS[CONTROL], *RULES, "algorithm.guard.mode=act"),
}
HEALTHY = "int8, healthy"
HEALTHY_KEYS = (*FORMATS["int8"], "algorithm.guard.mode=act", "algorithm.prompts_per_step=8")
PATIENT_FOR_ONE_STEP = ("algorithm.guard.patience=1",)
"""A quick run has two steps, of which the second has other engines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and write the record. SystemExit if a command fails."""
    parser = arguments("The guard on coarse codes, and on a healthy run.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy-steps", type=int, default=200)
    parser.add_argument("--warm", type=Path, help="work directory of a quickstart to take data and warm start from")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/guard"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that OUT has")
    options = parser.parse_args(argv)
    check_seeds(parser, options.seeds)
    warm = options.warm or warm_start(options.work / "warm", quick=options.quick, resume=options.resume)
    inputs = quickstart_inputs(options.warm)
    rows = rows_before(options.json, resume=options.resume)
    done = {(row["seed"], row["case"]) for row in rows}
    wanted = [(seed, case) for seed in range(1, 1 + (1 if options.quick else options.seeds)) for case in CASES]
    for seed, case in [*wanted, (1, HEALTHY)]:
        if (seed, case) not in done:
            quick = (*QUICK, *(PATIENT_FOR_ONE_STEP if case != HEALTHY else ())) if options.quick else ()
            keys = (*HEALTHY_KEYS, f"num_steps={options.healthy_steps}") if case == HEALTHY else CASES[case]
            rows.append(run(warm, options.work, seed, case, (*keys, *quick)))
            write(options.json, rows=rows, not_measured=["any GPU", "runs that have no row yet"], inputs=inputs)
    reached = [] if options.quick else goals(rows)
    write(options.json, rows=rows, goals=reached, not_measured=["any GPU"], inputs=inputs)
    return 0


def run(warm: Path, work: Path, seed: int, case: str, keys: Sequence[str]) -> Row:
    """The row of one run."""
    run_dir = work / f"seed-{seed}-{case.replace(', ', '-').replace(' ', '-')}"
    held_out = f"evaluation.sets.{HELD_OUT}.path={warm / 'data' / 'held_out.jsonl'}"
    metrics, seconds = run_example(warm, run_dir, [f"seed={seed}", held_out, "wandb.mode=disabled", *keys])
    before, after = held_out_accuracy(run_dir)
    levels = [row.get("guard/level", 0.0) for row in metrics]
    return {
        "seed": seed,
        "case": case,
        "num_steps": len(metrics),
        **mismatch_figures(metrics),
        **k3_parts(metrics),
        "k3_last": metrics[-1].get("rollout_corr/k3_kl", 0.0),
        "actions": metrics[-1].get("guard/actions", 0.0),
        "level_last": levels[-1],
        "levels_by_step": " ".join(f"{level:.0f}" for level in levels),
        "engine_starts": 1 + format_changes(run_dir),
        "sample_s": statistics.fmean(row.get("timing_s/mismatch_sample", 0.0) for row in metrics),
        "held_out_before": before,
        "held_out_after": after,
        "seconds": round(seconds, 1),
    }


def format_changes(run_dir: Path) -> int:
    """Actions of the guard after which engines were started again, as the run recorded them."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [str(event["activity"]) for event in events if event["actor"] == "guard"]
    return sum(": set" in line and ("in BF16" in line or "engine.format" in line) for line in lines)


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Goals: the control loses accuracy, the guard brings it back, and it never acts in a healthy run."""

    def below_bf16(case: str, bound: float, direction: Literal["at least", "at most"]) -> Goal:
        bf16, after = (by_seed(rows, "held_out_after", case=name) for name in ("bf16, off", case))
        name, lost = f"{case}: below bf16, held-out", Difference.between(bf16, after)
        return goal_in_points(name, lost, bound=bound, direction=direction)

    healthy = [float(row["actions"]) for row in rows if row["case"] == HEALTHY]
    quiet = Goal(name="actions in a healthy run", value=max(healthy), bound=0.0, direction="at most", unit="actions")
    return [
        below_bf16("3 bits, off", LEAST_EFFECT, "at least"),
        below_bf16("3 bits, act", MOST_LOST, "at most"),
        quiet,
    ]


if __name__ == "__main__":
    sys.exit(main())
