"""The example learned by GRPO, by PPO with a critic, and by GRPO with a divergence from the first policy as a cost.

`python -m benchmarks.learning.algorithms --json OUT [--warm DIR] [--seeds 3] [--resume] [--quick]`: the example's RL
once per seed and algorithm, from one warm start. DIR is a quickstart's work directory; without it a warm start is made
first. A run takes five to ten minutes. OUT is written after each run, and `--resume` continues it. The order of the
algorithms rotates over the seeds.

Rows: one per run, with held-out accuracy before and after. No duration is recorded, so other work may run meanwhile.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.example_run import mismatch_figures, run_example
from benchmarks.harness.paired import Difference, by_seed, check_seeds, goal_in_points
from benchmarks.harness.record import Goal, Row, arguments, rows_before, write
from benchmarks.harness.record_inputs import quickstart_inputs
from benchmarks.learning.example_epochs import warm_start
from benchmarks.learning.mismatch import QUICK
from examples.arithmetic.quickstart import HELD_OUT, held_out_accuracy

GRPO = "GRPO"
CRITIC_STEPS = 2
"""First steps of PPO, in which the critic learns alone; its runs are longer by so many steps."""
CASES: Mapping[str, tuple[str, ...]] = {
    GRPO: (),
    "PPO with a critic": (
        *("algorithm.advantage=gae", "algorithm.filter=none", "algorithm.kl.place=reward"),
        *("algorithm.kl.estimator=k1", "algorithm.kl.coefficient=0.001"),
        *("trainer.critic.optimizer.learning_rate=1e-3", f"trainer.critic.warmup_steps={CRITIC_STEPS}"),
    ),
    "GRPO, divergence in the loss": ("algorithm.kl.place=loss", "algorithm.kl.coefficient=0.001"),
}
NUM_STEPS = 14
LEAST_GAIN = 15.0
"""Points of held-out accuracy that every run must gain; the bound of `benchmarks.learning.quickstart`."""
MOST_BELOW = 3.0
"""Points of held-out accuracy by which an algorithm may gain less than GRPO: lower end of the interval over seeds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all algorithms and write the record. SystemExit if a run fails."""
    parser = arguments("The example learned by several algorithms, over seeds.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm", type=Path, help="work directory of a quickstart to take data and warm start from")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/algorithms"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that OUT has")
    options = parser.parse_args(argv)
    check_seeds(parser, options.seeds)
    warm = options.warm or warm_start(options.work / "warm", quick=options.quick, resume=options.resume)
    inputs = quickstart_inputs(options.warm)
    rows = rows_before(options.json, resume=options.resume)
    done = {(row["seed"], row["case"]) for row in rows}
    for seed, case in order(1 if options.quick else options.seeds):
        if (seed, case) not in done:
            rows.append(run(warm, options.work, seed, case, QUICK if options.quick else ()))
            write(options.json, rows=rows, not_measured=["any GPU", "runs that have no row yet"], inputs=inputs)
    write(options.json, rows=rows, goals=[] if options.quick else goals(rows), not_measured=["any GPU"], inputs=inputs)
    return 0


def order(num_seeds: int) -> list[tuple[int, str]]:
    """Seeds and algorithms in the order of the runs."""
    cases = list(CASES)
    return [
        (seed, cases[(place + seed) % len(cases)]) for seed in range(1, 1 + num_seeds) for place in range(len(cases))
    ]


def run(warm: Path, work: Path, seed: int, case: str, more: Sequence[str]) -> Row:
    """The row of one run; `more` are further keys."""
    run_dir = work / f"seed-{seed}-{case.replace(', ', '-').replace(' ', '-')}"
    held_out = f"evaluation.sets.{HELD_OUT}.path={warm / 'data' / 'held_out.jsonl'}"
    num_steps = NUM_STEPS + (CRITIC_STEPS if any("critic" in key for key in CASES[case]) else 0)
    keys = [f"seed={seed}", f"num_steps={num_steps}", held_out, "wandb.mode=disabled", *CASES[case], *more]
    metrics, _ = run_example(warm, run_dir, keys)
    before, after = held_out_accuracy(run_dir)
    return {
        "seed": seed,
        "case": case,
        "num_steps": len(metrics),
        **mismatch_figures(metrics),
        "reference_k3": statistics.fmean(row.get("actor/kl", 0.0) for row in metrics),
        "held_out_before": before,
        "held_out_after": after,
        "points": 100 * (after - before),
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Every algorithm learns in every seed, and gains as GRPO does but for `MOST_BELOW` points."""
    gains = {case: by_seed(rows, "points", case=case) for case in CASES}
    reached = [
        Goal(
            name=f"{case}: gain, worst seed",
            value=min(of_seed.values()),
            bound=LEAST_GAIN,
            direction="at least",
            unit="points",
        )
        for case, of_seed in gains.items()
    ]
    for case, of_seed in gains.items():
        if case != GRPO:
            name, difference = f"{case}: gain beside GRPO's", Difference.between(of_seed, gains[GRPO])
            reached.append(goal_in_points(name, difference, bound=-MOST_BELOW, direction="at least", scale=1.0))
    return reached


if __name__ == "__main__":
    sys.exit(main())
