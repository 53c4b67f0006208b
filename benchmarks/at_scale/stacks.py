"""What is compared: how each system schedules, samples and drafts, and the simulation of its steps.

Stacks with the names of other systems are their schemes, simulated by this project's code; none is a published figure.
Every stack is simulated in each arrangement that its design allows. Where the trainer has GPUs of its own, it has as
many as make the step shortest (`SHARES`). The trainer's work is the same in all stacks and does not shrink with drafts
or formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.at_scale.jobs import Precision, job
from benchmarks.harness.record import Row
from benchmarks.planner.simulator.run import Outcome, simulate
from benchmarks.planner.simulator.scheme import Cluster, Scheme
from benchmarks.planner.simulator.workload import Workload, draw, single_responses
from launcher.first_hour.shares import Shares

GROUP_SIZE, GROUPS_PER_STEP = 16, 512
MAX_TOKENS = 20_480.0
"""Longer answers are cut, as in DAPO. The mean is that of `benchmarks.planner`, 6,000 tokens before the cut."""
PROMPT_SHARE, PROMPT_CORRELATION = 0.6, 0.95
"""As in `benchmarks.planner`: prompts explain this share of the variance of log-lengths."""
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Shares of the GPUs for the trainer of a disaggregated stack."""
BOUND_BY_TRAINER = 0.95
"""A step of which the trainer works this share is bound by the trainer."""


Arrangement = Literal["colocated", "disaggregated"]
"""Whether trainer and engines use all GPUs in turns, or each has GPUs of its own."""
BOTH: tuple[Arrangement, ...] = ("colocated", "disaggregated")
APART: tuple[Arrangement, ...] = ("disaggregated",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A system."""

    scheme: Scheme
    precision: Precision = "BF16"
    drafter: str = "none"
    arrangements: tuple[Arrangement, ...] = BOTH
    """Those that the system's design allows."""


SYNCHRONOUS, RHYME = "synchronous", "RhymeRL's scheme, re-implemented"
ONE_AHEAD = Scheme(policy="adaptive", overlap=1, max_staleness=1, migration=True)
STACKS: Mapping[str, Stack] = {
    SYNCHRONOUS: Stack(scheme=Scheme(policy="static")),
    "synchronous, 8 bits (FlashRL)": Stack(scheme=Scheme(policy="static"), precision="8 bits"),
    # these two need engines that sample beside the trainer
    "one step off (NeMo-RL, verl)": Stack(
        scheme=Scheme(policy="static", overlap=1, max_staleness=1), arrangements=APART
    ),
    "asynchronous, first in first out (AReaL)": Stack(
        scheme=Scheme(policy="flexible", overlap=3, max_staleness=4), arrangements=APART
    ),
    RHYME: Stack(scheme=Scheme(policy="histopipe", overlap=1, max_staleness=1, migration=True), drafter="histospec"),
    "ours, synchronous, 8 bits, drafts": Stack(
        scheme=Scheme(policy="adaptive", migration=True), precision="8 bits", drafter="ours"
    ),
    "ours, overlap 1, BF16, no drafts": Stack(scheme=ONE_AHEAD),
    "ours, overlap 1, 8 bits": Stack(scheme=ONE_AHEAD, precision="8 bits"),
    "ours, overlap 1, BF16, drafts": Stack(scheme=ONE_AHEAD, drafter="ours"),
    "ours, overlap 1, 8 bits, drafts": Stack(scheme=ONE_AHEAD, precision="8 bits", drafter="ours"),
    "ours, overlap 2, 8 bits, drafts": Stack(
        scheme=Scheme(policy="adaptive", overlap=2, max_staleness=2, migration=True), precision="8 bits", drafter="ours"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One stack in one arrangement on one cluster."""

    model: str
    num_gpus: int
    stack: str
    arrangement: Arrangement
    seed: int = 1
    num_steps: int = 12
    measured: Shares | None = None
    """Measured shares of the GPU's peaks; None: assumed ones."""


def workload_of(case: Case) -> Workload:
    """The same responses for every stack."""
    drawn = draw(
        case.seed,
        num_steps=case.num_steps,
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        prompt_share=PROMPT_SHARE,
        prompt_correlation=PROMPT_CORRELATION,
    )
    return replace(
        drawn, lengths=np.minimum(drawn.lengths, MAX_TOKENS), forecasts=np.minimum(drawn.forecasts, MAX_TOKENS)
    )


def run(case: Case) -> Row:
    """Simulate a stack at the best division of its GPUs; returns its row."""
    stack, workload, is_colocated = STACKS[case.stack], workload_of(case), case.arrangement == "colocated"
    planned = job(case.model, case.num_gpus, stack.precision, workload.lengths[:GROUPS_PER_STEP], case.measured)
    train_s = planned.train_s
    ranks = planned.run.config.engine.tensor_parallel
    speed = planned.speed(stack.drafter)
    # a static placement does not keep groups together
    placed = single_responses(workload) if stack.scheme.policy == "static" else workload
    best: tuple[Outcome, int, float] | None = None
    for trainer_gpus in [case.num_gpus] if is_colocated else sorted({int(s * case.num_gpus) for s in SHARES}):
        num_engines = (case.num_gpus if is_colocated else case.num_gpus - trainer_gpus) // ranks
        seconds = train_s * case.num_gpus / trainer_gpus
        cluster = Cluster(
            num_engines=num_engines,
            num_slots=planned.num_slots,
            speed=speed,
            train_s_per_token=seconds * case.num_steps / float(workload.lengths.sum()),
            publish_s=planned.publish_s(in_turns=is_colocated),
            is_colocated=is_colocated,
        )
        outcome = simulate(placed, cluster, stack.scheme)
        if best is None or outcome.step_s < best[0].step_s:
            best = outcome, trainer_gpus, seconds
    assert best is not None
    outcome, trainer_gpus, seconds = best
    is_bound = not is_colocated and seconds > BOUND_BY_TRAINER * outcome.step_s
    return {
        "what": "stack",
        "model": case.model,
        "gpus": case.num_gpus,
        "stack": case.stack,
        "arrangement": case.arrangement,
        "seed": case.seed,
        "step_s": round(outcome.step_s, 1),
        "train_s": round(seconds, 1),
        "trainer_gpus": trainer_gpus,
        "bound_by": "trainer" if is_bound else "rollout" if not is_colocated else "both in turns",
        "slots": planned.num_slots,
        "mean_staleness": round(outcome.mean_staleness, 2),
        "max_staleness": outcome.max_staleness,
        "train_all_gpus_s": round(train_s, 1),
    }
