"""Cases of the planner's benchmark: the schemes, the workloads, and the simulation of one case.

Worker processes import this module by its name; they cannot import `benchmarks.planner.__main__`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness.record import Row
from benchmarks.planner.simulator.bounds import longest_s, saturated_s
from benchmarks.planner.simulator.engines import Speed
from benchmarks.planner.simulator.run import simulate
from benchmarks.planner.simulator.scheme import Cluster, Scheme
from benchmarks.planner.simulator.speeds import DRAFTERS, inferred
from benchmarks.planner.simulator.workload import Workload, draw, replayed, single_responses
from history.lengths.reuse import rank_correlation
from history.store.traces import read_traces

NUM_SLOTS, REQUESTS_PER_ENGINE, GROUP_SIZE = 64, 128, 8
PROMPT_CORRELATION, PROMPT_SHARE = 0.95, 0.6

SCHEMES = {
    "static": Scheme(policy="static"),
    "one step off": Scheme(policy="static", overlap=1, max_staleness=1),
    "asynchronous, first in first out": Scheme(policy="flexible", overlap=3, max_staleness=4),
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
    """`responses`, `groups`, or `exact`: each group's forecast is its true mean length."""
    correlation: float = PROMPT_SHARE
    """Of forecasts and lengths for `responses`; for `groups` and `exact`, the prompts' share of the variance."""
    drafter: str = "none"
    num_trainer_gpus: int = 0
    """0: training takes half the time of saturated engines."""
    is_colocated: bool = False


def workload_of(case: Case) -> Workload:
    """The responses of a case. A static placement has them one by one."""
    by_response = case.forecasts == "responses"
    group_size = 1 if by_response else GROUP_SIZE
    workload = draw(
        case.seed,
        num_steps=case.num_steps,
        groups_per_step=64 * REQUESTS_PER_ENGINE // group_size * case.num_engines // 64,
        group_size=group_size,
        prompt_share=1.0 if by_response else case.correlation,
        prompt_correlation=case.correlation if by_response else PROMPT_CORRELATION,
    )
    if case.forecasts == "exact":
        workload = replace(workload, forecasts=workload.lengths.mean(axis=1))
    return single_responses(workload) if SCHEMES[case.scheme].policy == "static" else workload


def run(case: Case) -> Row:
    """Simulate one case; returns its row."""
    began = time.perf_counter()
    workload, speed, scheme = workload_of(case), inferred(NUM_SLOTS, case.drafter), SCHEMES[case.scheme]
    bound = _saturated_s(workload, speed, case.num_engines) / workload.num_steps
    # drafts do not shorten training
    work = _saturated_s(workload, inferred(NUM_SLOTS), case.num_engines) / 2
    if case.num_trainer_gpus:  # the same training work in all divisions of the GPUs
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
        "rank_correlation": _forecast_correlation(workload),
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


def _forecast_correlation(workload: Workload) -> float:
    few = workload.lengths[:4096]
    forecasts = np.repeat(workload.forecasts[: len(few)], few.shape[1])
    return round(rank_correlation(forecasts.tolist(), few.ravel().tolist()), 3)


def cases(*, quick: bool) -> list[Case]:
    """All cases of a full or quick run."""
    if quick:
        return [Case(scheme=name, num_engines=8, num_steps=8) for name in SCHEMES]
    all_cases = [Case(scheme=name, seed=seed) for name in SCHEMES for seed in SEEDS]
    for name in SCHEMES:
        all_cases += [
            Case(scheme=name, forecasts="responses", correlation=correlation, seed=seed)
            for correlation in CORRELATIONS
            for seed in (SEEDS if correlation == JUDGED_CORRELATION else SEEDS[:1])
        ]
        all_cases += [Case(scheme=name, correlation=share) for share in (0.4, 0.8)]
        all_cases += [Case(scheme=name, forecasts="exact")]
        all_cases += [Case(scheme=name, num_engines=number, num_steps=steps) for number, steps in LARGE.items()]
        for drafter in DRAFTERS:
            for seed in SEEDS:
                all_cases += [
                    Case(scheme=name, drafter=drafter, seed=seed),
                    Case(
                        scheme=name,
                        drafter=drafter,
                        seed=seed,
                        forecasts="responses",
                        correlation=JUDGED_CORRELATION,
                    ),
                ]
    for scheme, engines, trainers in EQUAL_GPUS:
        all_cases.append(
            Case(scheme=scheme, num_engines=engines, num_trainer_gpus=trainers or engines, is_colocated=trainers == 0)
        )
    return all_cases


SEEDS = (1, 2, 3)
JUDGED_CORRELATION = 0.9
CORRELATIONS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
LARGE = {8: 50, 256: 30, 1024: 20}
"""Number of simulated steps by number of engines."""

TOTAL_GPUS = 96
EQUAL_GPUS: Sequence[tuple[str, int, int]] = (
    ("static", 96, 0),
    ("adaptive, overlap 1", 96, 0),
    *((scheme, TOTAL_GPUS - trainers, trainers) for scheme in tuple(SCHEMES)[1:] for trainers in (16, 24, 32)),
)
"""(scheme, engines, GPUs of the trainer); 0: engines and trainer share all GPUs."""


def replays(
    traces: Sequence[Path], speed: Speed, *, num_engines: int, num_slots: int, train_share: float
) -> Iterator[Row]:
    """Every scheme on recorded responses; training takes `train_share` of the time of saturated engines."""
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
        outcome = simulate(single_responses(recorded) if scheme.policy == "static" else recorded, cluster, scheme)
        yield {
            "what": "replay",
            "scheme": name,
            "engines": num_engines,
            "slots": num_slots,
            "steps": recorded.num_steps,
            "rank_correlation": _forecast_correlation(recorded),
            "step_s": outcome.step_s,
            "bubble": round(1 - bound / recorded.num_steps / outcome.step_s, 4),
            "idle": round(outcome.idle, 4),
            "mean_staleness": round(outcome.mean_staleness, 4),
            "max_staleness": outcome.max_staleness,
        }
