"""Step time and idle time of every placement policy, on simulated engines with long-tailed response lengths.

`python -m benchmarks.planner --json OUT [--quick] [--traces FILE.. [--step-time FILE --only model=7B ..]]`. Policies,
admission and dispatcher are the product's own (`rollout.planning.policies`, `rollout.planning.admission`,
`rollout.planning.dispatcher`); engines and trainer are simulated (`benchmarks.planner.simulator`). A group of eight
responses is placed on one engine. The baseline `static` places each response alone, because a synchronous step does not
need whole groups. All speeds are relative to `static`. Two kinds of forecasts differ in how well they predict lengths:

    responses    each response has its own forecast (groups of one) with a given rank correlation
    groups       each prompt has a forecast. A given share of the variance of log-lengths is the prompt's, and the
                 forecast correlates with it by 0.95; with a share of 0.6 the rank correlation of responses is 0.71

The engines' constants are inferred for a 7B model on a large GPU, not measured. So the figures compare schedules; they
do not give the speed of a machine. With drafts, tokens and verified drafts per forward come from the record of
`benchmarks.drafting`. Training takes half the time of saturated engines without drafts, except where equal numbers of
GPUs are compared. Drafts do not shorten it.
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.harness.record import Row, arguments, write
from benchmarks.planner.goals import goals
from benchmarks.planner.schedules import GROUP_SIZE, NUM_SLOTS, cases, replays, run
from benchmarks.planner.simulator.speeds import inferred, measured
from benchmarks.planner.simulator.workload import draw
from rollout.planning.plan import EngineLoad, GroupForecast
from rollout.planning.policies import POLICIES, plan
from rollout.types import GroupId


def planning_rows(*, quick: bool) -> Iterator[Row]:
    """Milliseconds to place 65,536 responses over 1,024 engines."""
    num_groups, num_engines = (1024, 64) if quick else (65_536 // GROUP_SIZE, 1024)
    for group_size, count in ((GROUP_SIZE, num_groups), (1, num_groups * GROUP_SIZE)):
        lengths = draw(
            1, num_steps=1, groups_per_step=count, group_size=1, prompt_share=1.0, prompt_correlation=0.9
        ).forecasts
        groups = [
            GroupForecast(group_id=GroupId(p), step=0, num_responses=group_size, tokens=float(tokens))
            for p, tokens in enumerate(lengths)
        ]
        engines = [EngineLoad(num_seats=NUM_SLOTS)] * num_engines
        for name in POLICIES:
            seconds = []
            for _ in range(3 if quick else 7):
                began = time.perf_counter()
                plan(name, groups, engines)
                seconds.append(time.perf_counter() - began)
            yield {
                "what": "planning",
                "scheme": name,
                "engines": num_engines,
                "groups": count,
                "responses": count * group_size,
                "ms": round(1e3 * float(np.median(seconds)), 2),
            }


def main() -> int:
    """Simulate all cases or replay traces, and write the record with its goals."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--traces", nargs="+", type=Path, default=[], help="replay the traces of a run (`traces/`) instead"
    )
    parser.add_argument("--engines", type=int, default=8, help="with --traces")
    parser.add_argument("--slots", type=int, default=NUM_SLOTS, help="with --traces")
    parser.add_argument(
        "--train-share", type=float, default=0.5, help="with --traces: training time over the time of saturated engines"
    )
    parser.add_argument("--step-time", type=Path, help="with --traces: a record of benchmarks.rollout.step_time")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FIELD=VALUE", help="use the rows of that record with these values"
    )
    options = parser.parse_args()
    if options.traces:
        only = dict(pair.split("=", 1) for pair in options.only)
        speed = measured(options.step_time, options.slots, only=only) if options.step_time else inferred(options.slots)
        rows = list(
            replays(
                options.traces,
                speed,
                num_engines=options.engines,
                num_slots=options.slots,
                train_share=options.train_share,
            )
        )
        for row in rows:
            print(*row.values())
        write(options.json, rows=rows, not_measured=["engines and trainer are models"])
        return 0
    rows = list(planning_rows(quick=options.quick))
    todo = sorted(cases(quick=options.quick), key=lambda case: -case.num_engines)
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        for done, row in enumerate(pool.map(run, todo), start=1):
            chosen = " ".join(str(row[key]) for key in ("scheme", "engines", "forecasts", "correlation", "drafts"))
            stale = f"{row['mean_staleness']:.2f}/{row['max_staleness']}"
            print(
                f"{done}/{len(todo)} {chosen}: {row['step_s']} s, bubble {row['bubble']:.1%}, stale {stale}", flush=True
            )
            rows.append(row)
    write(
        options.json,
        rows=rows,
        goals=[] if options.quick else list(goals(rows)),
        not_measured=[
            "engines are a model: its constants are inferred, not measured "
            "(`benchmarks.rollout.step_time --device cuda`)"
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
