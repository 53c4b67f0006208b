"""Who waits, and for how long: every placement policy on simulated engines with responses of long-tailed lengths.

`python -m benchmarks.planner --json OUT [--quick] [--traces FILE.. [--step-time FILE --only model=7B ..]]`. Policies,
admission and dispatcher are the product's own (`rollout.planning.policies`, `rollout.planning.admission`,
`rollout.planning.dispatcher`); engines and trainer are a model (`benchmarks.planner.simulator`). Groups of eight are
placed whole. The baseline, `static`, places single responses, since a synchronous step needs no group to stay together;
it is what everything is compared with. How well lengths are foretold is varied in two ways:

    responses    every response has a forecast of its own (groups of one), right to a given rank correlation
    groups       log-lengths vary by a share over prompts, and the prompt's part is foretold to 0.95: with
                 a share of 0.6 the rank correlation of responses is 0.71

The constants of the engines are inferred from a large GPU and a 7B model, not measured: figures are ratios of
schedules, not speeds of a machine. With drafts, tokens and verified drafts a forward come from the drafting
benchmark's record. The trainer takes half as long as saturated engines, except where equal numbers of GPUs are
compared.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.harness.record import Goal, Row, arguments, write
from benchmarks.planner.simulator.bounds import longest_s, saturated_s
from benchmarks.planner.simulator.engines import Speed
from benchmarks.planner.simulator.run import Cluster, Outcome, Scheme, simulate
from benchmarks.planner.simulator.speeds import DRAFTERS, inferred, measured
from benchmarks.planner.simulator.workload import Workload, draw, replayed, single_responses
from history.lengths.reuse import rank_correlation
from history.store.traces import read_traces
from rollout.planning.plan import EngineLoad, GroupForecast
from rollout.planning.policies import POLICIES, plan
from rollout.types import GroupId

NUM_SLOTS, REQUESTS_PER_ENGINE, GROUP_SIZE = 64, 128, 8
PROMPT_CORRELATION, PROMPT_SHARE = 0.95, 0.6

SCHEMES = {
    "static": Scheme(policy="static"),
    "lpt": Scheme(policy="lpt"),
    "histopipe": Scheme(policy="histopipe", overlap=1, max_staleness=1, migration=True),
    "adaptive, head start .3": Scheme(policy="adaptive", head_start=0.3, max_staleness=1, migration=True),
    "adaptive, overlap 1": Scheme(policy="adaptive", overlap=1, max_staleness=1, migration=True),
    "adaptive, overlap 1, no migration": Scheme(policy="adaptive", overlap=1, max_staleness=1),
    "adaptive, overlap 1, tail isolated": Scheme(
        policy="adaptive", overlap=1, max_staleness=1, migration=True, tail_share=0.125
    ),
    "adaptive, overlap 1, head start .2": Scheme(
        policy="adaptive", overlap=1, head_start=0.2, max_staleness=2, migration=True
    ),
    "adaptive, overlap 2": Scheme(policy="adaptive", overlap=2, max_staleness=2, migration=True),
    "flexible": Scheme(policy="flexible", overlap=2, max_staleness=3, migration=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation."""

    scheme: str
    seed: int = 1
    num_engines: int = 64
    num_steps: int = 50
    forecasts: str = "groups"
    """`responses`, `groups`, or `exact`: groups whose mean length is known."""
    correlation: float = PROMPT_SHARE
    """Of `responses`; of `groups` and `exact` the prompts' share of the variance."""
    drafter: str = "none"
    num_trainer_gpus: int = 0
    """0: the trainer is as large as to take half of the time of saturated engines."""
    is_colocated: bool = False


def workload_of(case: Case) -> Workload:
    """The responses of a case. The baseline sees them one by one."""
    by_response = case.forecasts == "responses"
    group_size = 1 if by_response else GROUP_SIZE
    found = draw(
        case.seed,
        num_steps=case.num_steps,
        groups_per_step=64 * REQUESTS_PER_ENGINE // group_size * case.num_engines // 64,
        group_size=group_size,
        prompt_share=1.0 if by_response else case.correlation,
        prompt_correlation=case.correlation if by_response else PROMPT_CORRELATION,
    )
    if case.forecasts == "exact":
        found = replace(found, forecasts=found.lengths.mean(axis=1))
    return single_responses(found) if case.scheme == "static" else found


def run(case: Case) -> Row:
    """Simulate one case; a flat row."""
    began = time.perf_counter()
    workload, speed, scheme = workload_of(case), inferred(NUM_SLOTS, case.drafter), SCHEMES[case.scheme]
    bound = _saturated_s(workload, speed, case.num_engines) / workload.num_steps
    work = bound * workload.num_steps / 2
    if case.num_trainer_gpus:  # of the same trainer, whatever engines do; else one that keeps up with them
        work = _saturated_s(workload, inferred(NUM_SLOTS), 1) / 4
    cluster = Cluster(
        num_engines=case.num_engines,
        num_slots=NUM_SLOTS,
        speed=speed,
        train_s_per_token=work / max(case.num_trainer_gpus, 1) / float(workload.lengths.sum()),
        is_colocated=case.is_colocated,
    )
    outcome = simulate(workload, cluster, scheme)
    return {
        "what": "schedule",
        "scheme": case.scheme,
        "seed": case.seed,
        "engines": case.num_engines,
        "steps": case.num_steps,
        "forecasts": case.forecasts,
        "correlation": case.correlation,
        "rank_correlation": _foretold(workload),
        "drafts": case.drafter,
        "trainer_gpus": case.num_trainer_gpus,
        "colocated": case.is_colocated,
        "step_s": round(outcome.step_s, 3),
        "saturated_step_s": round(bound, 3),
        "longest_response_step_s": round(
            longest_s(
                workload.lengths,
                fixed_s=speed.fixed_s,
                context_s=speed.context_s,
                gains=speed.gains,
                max_staleness=scheme.max_staleness,
            ),
            3,
        ),
        "bubble": round(1 - bound / outcome.step_s, 4),
        "idle": round(outcome.idle, 4),
        "mean_staleness": round(outcome.mean_staleness, 4),
        "max_staleness": outcome.max_staleness,
        "samples_per_hour": round(3600 * workload.lengths.size / workload.num_steps / outcome.step_s, 1),
        "stolen_groups": outcome.num_stolen,
        "moved_groups": outcome.num_moved,
        "batches_that_waited": outcome.num_waits,
        "consumed_as_submitted": _is_unbiased(workload, outcome),
        "simulated_in_s": round(time.perf_counter() - began, 2),
    }


def _saturated_s(workload: Workload, speed: Speed, num_engines: int) -> float:
    return saturated_s(
        workload.lengths,
        fixed_s=speed.fixed_s,
        context_s=speed.context_s,
        gains=speed.gains,
        num_engines=num_engines,
    )


def _foretold(workload: Workload) -> float:
    few = workload.lengths[:4096]
    forecasts = np.repeat(workload.forecasts[: len(few)], few.shape[1])
    return round(rank_correlation(forecasts.tolist(), few.ravel().tolist()), 3)


def _is_unbiased(workload: Workload, outcome: Outcome) -> bool:
    """Whether the lengths that were trained on are those that were drawn."""
    return bool(np.array_equal(outcome.consumed_lengths, np.sort(workload.lengths.ravel())))


def cases(*, quick: bool) -> list[Case]:
    """Everything that is simulated."""
    if quick:
        return [Case(scheme=name, num_engines=8, num_steps=8) for name in SCHEMES]
    found = [Case(scheme=name, seed=seed) for name in SCHEMES for seed in (1, 2, 3)]
    for name in SCHEMES:
        found += [Case(scheme=name, forecasts="responses", correlation=correlation) for correlation in CORRELATIONS]
        found += [Case(scheme=name, correlation=share) for share in (0.4, 0.8)]
        found += [Case(scheme=name, forecasts="exact")]
        found += [Case(scheme=name, num_engines=number, num_steps=steps) for number, steps in LARGE.items()]
        for drafter in DRAFTERS:
            found += [
                Case(scheme=name, drafter=drafter),
                Case(scheme=name, drafter=drafter, forecasts="responses", correlation=0.9),
            ]
    for scheme, engines, trainers in EQUAL_GPUS:
        found.append(
            Case(scheme=scheme, num_engines=engines, num_trainer_gpus=trainers or engines, is_colocated=trainers == 0)
        )
    return found


CORRELATIONS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
LARGE = {8: 50, 256: 30, 1024: 20}
"""Engines, and steps that are simulated."""

WITH_DRAFTS = ("adaptive, overlap 1, head start .2", "adaptive, overlap 2")
"""Schemes with at most 2 versions of staleness."""

GOALS: dict[str, tuple[float | None, float | None]] = {
    "histopipe": (1.45, 1.6),
    "adaptive, overlap 1": (1.7, 1.8),
    "adaptive, head start .3": (None, 1.5),
    "adaptive, overlap 1, head start .2": (1.85, 2.15),
    "adaptive, overlap 2": (None, 2.35),
    "flexible": (2.6, 2.6),
}
"""Speed over synchronous `static`: (groups at 0.71, responses at 0.9)."""

TOTAL_GPUS = 96
EQUAL_GPUS: Sequence[tuple[str, int, int]] = (
    ("static", 96, 0),
    ("adaptive, overlap 1", 96, 0),
    *((scheme, TOTAL_GPUS - trainers, trainers) for scheme in tuple(SCHEMES)[2:] for trainers in (16, 24, 32)),
)
"""(scheme, engines, GPUs of the trainer; 0: engines and trainer share all)"""


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


def _chosen(rows: Sequence[Row], scheme: str, **wanted: object) -> list[Row]:
    """Rows of a scheme; of 64 engines, groups at 0.71 and no drafts where nothing else is wanted."""
    wanted = {"forecasts": "groups", "correlation": PROMPT_SHARE, "engines": 64, "drafts": "none", **wanted}
    found = [row for row in rows if row["what"] == "schedule" and row["scheme"] == scheme and row["trainer_gpus"] == 0]
    return [row for row in found if not row["colocated"] and all(row[key] == one for key, one in wanted.items())]


def _speedup(rows: Sequence[Row], scheme: str, **chosen: object) -> float:
    """Median over seeds of how much faster a scheme is than `static` without drafts on the same responses."""
    base = {row["seed"]: float(row["step_s"]) for row in _chosen(rows, "static", **{**chosen, "drafts": "none"})}
    return float(np.median([base[row["seed"]] / float(row["step_s"]) for row in _chosen(rows, scheme, **chosen)]))


def _worst(rows: Sequence[Row], scheme: str, figure: str, **chosen: object) -> float:
    return max(float(row[figure]) for row in _chosen(rows, scheme, **chosen))


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """The figures that were to be reached; those by `groups` are the headline."""
    by_response: dict[str, object] = {"forecasts": "responses", "correlation": 0.9}
    headlines: Sequence[tuple[str, dict[str, object]]] = (("groups at 0.71", {}), ("responses at 0.9", by_response))
    for scheme, bounds in GOALS.items():
        for (name, chosen), bound in zip(headlines, bounds, strict=True):
            if bound is not None:
                yield _at_least(f"{scheme}, {name}", _speedup(rows, scheme, **chosen), bound)
        stale = max(
            float(row["max_staleness"]) for row in rows if row.get("scheme") == scheme and "max_staleness" in row
        )
        yield _at_most(f"{scheme}: largest staleness anywhere", stale, SCHEMES[scheme].max_staleness, "versions")
    overlapped = [
        _speedup(rows, "adaptive, overlap 1", forecasts="responses", correlation=correlation)
        for correlation in CORRELATIONS
    ]
    yield _at_least("adaptive, overlap 1, worst over correlations", min(overlapped), 1.65)
    for scheme, bound in (("adaptive, head start .3", 0.3), ("adaptive, overlap 1, head start .2", 1.2)):
        stale = _worst(rows, scheme, "mean_staleness", **by_response)
        yield _at_most(f"{scheme}: mean staleness", stale, bound, "versions")
    for name, chosen in headlines:
        yield _at_most(f"flexible, {name}: bubble", _worst(rows, "flexible", "bubble", **chosen), 0.05, "share")
        best = max(_speedup(rows, scheme, drafts="ours", **chosen) for scheme in WITH_DRAFTS)
        paper = _speedup(rows, "histopipe", drafts="histospec", **chosen)
        yield _at_least(f"with drafts, {name}", best, 5.0)
        yield _at_least(f"with drafts, {name}: over the paper's stack", best / paper, 1.2)
    biased = sum(row["consumed_as_submitted"] is False for row in rows if row["what"] == "schedule")
    yield _at_most("runs whose consumed lengths are not the drawn ones", biased, 0, "runs")
    slowest = max(float(row["ms"]) for row in rows if row["what"] == "planning")
    yield _at_most("planning 65,536 responses, slowest policy", slowest, 200, "ms")


def _at_least(name: str, value: float, bound: float) -> Goal:
    return Goal(name=name, value=value, bound=bound, direction="at least", unit="x")


def _at_most(name: str, value: float, bound: float, unit: str) -> Goal:
    return Goal(name=name, value=value, bound=bound, direction="at most", unit=unit)


def replays(
    traces: Sequence[Path], speed: Speed, *, num_engines: int, num_slots: int, train_share: float
) -> Iterator[Row]:
    """Every scheme on recorded responses; the trainer takes `train_share` of the time of saturated engines."""
    recorded = replayed(trace for path in traces for trace in read_traces(path))
    bound = _saturated_s(recorded, speed, num_engines)
    cluster = Cluster(
        num_engines=num_engines,
        num_slots=num_slots,
        speed=speed,
        train_s_per_token=train_share * bound / float(recorded.lengths.sum()),
        publish_s=0.0,
    )
    for name, scheme in SCHEMES.items():
        outcome = simulate(single_responses(recorded) if name == "static" else recorded, cluster, scheme)
        yield {
            "what": "replay",
            "scheme": name,
            "engines": num_engines,
            "slots": num_slots,
            "steps": recorded.num_steps,
            "rank_correlation": _foretold(recorded),
            "step_s": outcome.step_s,
            "bubble": round(1 - bound / recorded.num_steps / outcome.step_s, 4),
            "idle": round(outcome.idle, 4),
            "mean_staleness": round(outcome.mean_staleness, 4),
            "max_staleness": outcome.max_staleness,
        }


def main() -> int:
    """Simulate, record, say what was reached."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--traces", nargs="+", type=Path, default=[], help="replay these instead (`traces/` of a run)")
    parser.add_argument("--engines", type=int, default=8, help="with --traces")
    parser.add_argument("--slots", type=int, default=NUM_SLOTS, help="with --traces")
    parser.add_argument("--train-share", type=float, default=0.5, help="with --traces: of the time of full engines")
    parser.add_argument("--step-time", type=Path, help="with --traces: a record of benchmarks.rollout.step_time")
    parser.add_argument("--only", nargs="+", default=[], metavar="FIELD=VALUE", help="rows of that record to take")
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
