"""Assignment of samples to ranks and micro batches: time, imbalance and fill, compared with verl's balancing.

`python -m benchmarks.packing --json OUT [--quick] [--peer build/verl]`; `python -m benchmarks.packing.verl` downloads
the peer. Both assign the same samples alternately in one process, and times are medians. Both use verl's cost
coefficients. Response lengths are lognormal (sigma 0.9, mean 6,000 before they are cut at 32,768); prompts have 128 to
639 tokens.

Rows `ranks`: one micro batch per rank without a bound on its tokens. `micro_batches`: at most 33,792 tokens each.
`pipeline`: at most 67,584 tokens, with the duration of a simulated 1F1B schedule in which each stage takes a micro
batch's cost and the overhead of `CostModel`. `first_call`: CPU seconds of a new process until its first samples are
assigned, with compilation or from the cache. `seconds` end when the last rank knows its micro batches, and
`total_seconds` add up all ranks. The peer's ranks plan their own samples in parallel; the product plans all in one
place.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness.record import Goal, Row, arguments, write
from benchmarks.packing import verl
from benchmarks.packing.bounds import fewest_micro_batches, least_rank_cost, one_forward_one_backward
from megatron_rl.batching.balance import balance, load_kernels
from megatron_rl.batching.cost_model import CostModel

Bins = list[list[int]]

COSTS = CostModel(parity_tokens=24_576)
LONGEST_RESPONSE = 32_768
MAX_TOKENS = LONGEST_RESPONSE + 1024
LOOSE_TOKENS = 2 * MAX_TOKENS
RANKS = ((512, 8), (512, 64), (8192, 64), (8192, 256), (65_536, 64), (65_536, 512))
"""(samples, ranks)."""
MICRO_BATCHES = ((512, 8), (8192, 64), (65_536, 512))
PIPELINES = ((512, 8, 4), (8192, 64, 4), (8192, 64, 8))
"""(samples, ranks, stages)."""
ROUNDS = {512: 9, 8192: 5, 65_536: 3}
"""Rounds by number of samples; in each round the product plans five times, the peer once."""
QUICK_PEER = 512
"""Most samples that a quick run gives the peer."""
MOST_PAIRS = 65_536 * 64
"""Most samples x ranks for the peer without equal numbers per rank; above, it takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Samples, ranks and the bound of one comparison."""

    kind: str
    samples: int
    ranks: int
    max_tokens: int
    """Bound on the tokens of a micro batch; large enough for all samples if there is no bound."""
    costs: CostModel = COSTS

    @property
    def lengths(self) -> list[int]:
        """Prompt and response tokens of each sample; equal at every call."""
        generator = np.random.default_rng(self.samples)
        responses = generator.lognormal(np.log(6000) - 0.9**2 / 2, 0.9, size=self.samples)
        prompts = generator.integers(128, 640, size=self.samples)
        lengths: list[int] = (np.clip(responses, 1, LONGEST_RESPONSE).astype(np.int64) + prompts).tolist()
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of assigning samples."""

    name: str
    place: Callable[[list[int]], verl.Planned]
    per_round: int


def ours(case: Case, *, costs: CostModel, name: str = "ours") -> Method:
    """The product's method."""

    def place(lengths: list[int]) -> verl.Planned:
        started = time.perf_counter()
        ranks = balance(lengths, num_ranks=case.ranks, max_tokens=case.max_tokens, costs=costs)
        seconds = time.perf_counter() - started
        return verl.Planned(ranks=ranks, seconds=seconds, total_seconds=seconds)

    return Method(name=name, place=place, per_round=5)


def methods(case: Case, peer: verl.Balancing | None) -> list[Method]:
    """The methods that are compared in a case."""
    compared = [ours(case, costs=case.costs)]
    if case.kind == "pipeline":
        compared.append(ours(case, costs=COSTS, name="ours without knowing of the pipeline"))
    if peer is None:
        return compared
    if case.kind != "ranks":
        bounded = partial(verl.plan_micro_batches, peer, num_ranks=case.ranks, max_tokens=case.max_tokens)
        return [*compared, Method(name="verl", place=bounded, per_round=1)]
    sizes = [True, False] if case.samples * case.ranks <= MOST_PAIRS else [True]
    return compared + [
        Method(
            name="verl" if equal else "verl, any number on a rank",
            place=partial(verl.plan_ranks, peer, num_ranks=case.ranks, equal_size=equal),
            per_round=1,
        )
        for equal in sizes
    ]


def judged(case: Case, lengths: list[int], ranks: list[Bins]) -> dict[str, float]:
    """Figures of an assignment, the same for all methods."""
    costs = case.costs.sample_costs(np.asarray(lengths, dtype=np.int64))
    rank_costs = [[float(costs[micro_batch].sum()) for micro_batch in rank] for rank in ranks]
    sums = np.array([sum(rank) for rank in rank_costs])
    micro_batches = [micro_batch for rank in ranks for micro_batch in rank]
    assert sorted(sample for micro_batch in micro_batches for sample in micro_batch) == list(range(len(lengths)))
    assert max(sum(lengths[sample] for sample in micro_batch) for micro_batch in micro_batches) <= case.max_tokens
    figures = {
        "imbalance": float(sums.max() / sums.mean() - 1),
        "over_bound": float(sums.max()) / least_rank_cost(costs, case.ranks) - 1,
    }
    if case.kind == "ranks":
        return figures
    count = max(len(rank) for rank in ranks)
    fewest = fewest_micro_batches(lengths, num_ranks=case.ranks, max_tokens=case.max_tokens)
    room = case.ranks * case.max_tokens
    figures |= {
        "micro_batches": count,
        "bound_micro_batches": fewest,
        "fill": sum(lengths) / (count * room),
        "bound_fill": sum(lengths) / (fewest * room),
    }
    if case.kind == "pipeline":
        overhead, stages = case.costs.overhead_tokens, case.costs.pipeline
        durations = [one_forward_one_backward([cost + overhead for cost in rank], stages) for rank in rank_costs]
        figures["duration_tokens"] = max(durations)
    return figures


def measure(case: Case, peer: verl.Balancing | None, *, rounds: int) -> list[Row]:
    """A row for each method; the methods alternate."""
    lengths = case.lengths
    compared = methods(case, peer)
    plans: dict[str, list[verl.Planned]] = {method.name: [] for method in compared}
    for _ in range(rounds):
        for method in compared:
            plans[method.name] += [method.place(lengths) for _ in range(method.per_round)]
    assert all(plan.ranks == planned[0].ranks for planned in plans.values() for plan in planned)
    return [
        {
            "kind": case.kind,
            "samples": case.samples,
            "ranks": case.ranks,
            "stages": case.costs.pipeline,
            "method": name,
            "repeats": len(planned),
            "seconds": median(plan.seconds for plan in planned),
            "slowest_seconds": max(plan.seconds for plan in planned),
            "total_seconds": median(plan.total_seconds for plan in planned),
            **judged(case, lengths, planned[0].ranks),
        }
        for name, planned in plans.items()
    ]


def first_calls() -> list[Row]:
    """CPU seconds until a new process has assigned its first samples."""
    code = (
        "import time; began = time.process_time(); from megatron_rl.batching.balance import load_kernels; "
        "load_kernels(); print(time.process_time() - began)"
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        for method in ("compiling", "from the cache"):
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=os.environ | {"NUMBA_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            rows.append({"kind": "first_call", "method": method, "cpu_seconds": float(done.stdout)})
    return rows


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Goals of the measured cases."""
    reached = []
    by_case = {(row["kind"], row.get("samples"), row.get("ranks"), row["method"]): row for row in rows}
    if large := by_case.get(("micro_batches", 65_536, 512, "ours")):
        name = "65,536 samples on 512 ranks, at most 33,792 tokens a micro batch: "
        milliseconds = 1000 * float(large["seconds"])
        reached += [
            Goal(name=name + "median duration", value=milliseconds, bound=60, direction="at most", unit="ms"),
            Goal(
                name=name + "costliest rank over the mean, minus 1",
                value=float(large["imbalance"]),
                bound=1e-4,
                direction="at most",
                unit="",
            ),
            Goal(name=name + "fill", value=float(large["fill"]), bound=0.98, direction="at least", unit=""),
        ]
    more = [
        float(row["micro_batches"]) - float(by_case[(kind, samples, ranks, "verl")]["micro_batches"])
        for (kind, samples, ranks, method), row in by_case.items()
        if kind == "micro_batches" and method == "ours" and (kind, samples, ranks, "verl") in by_case
    ]
    if more:
        name = "micro batches a rank more than verl's, the worst case"
        reached.append(Goal(name=name, value=max(more), bound=0, direction="at most", unit=""))
    if few := by_case.get(("ranks", 512, 64, "ours")):
        name = "8 samples a rank: costliest rank over the bound, minus 1"
        reached.append(Goal(name=name, value=float(few["over_bound"]), bound=1e-3, direction="at most", unit=""))
    return reached


def cases() -> list[Case]:
    """All cases; packing is fast, so a quick run has the same cases."""
    return [
        *(Case(kind="ranks", samples=n, ranks=ranks, max_tokens=n * MAX_TOKENS) for n, ranks in RANKS),
        *(Case(kind="micro_batches", samples=n, ranks=ranks, max_tokens=MAX_TOKENS) for n, ranks in MICRO_BATCHES),
        *(
            Case(
                kind="pipeline",
                samples=n,
                ranks=ranks,
                max_tokens=LOOSE_TOKENS,
                costs=CostModel(parity_tokens=COSTS.parity_tokens, pipeline=stages),
            )
            for n, ranks, stages in PIPELINES
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case and write the record after each."""
    parser = arguments("Assignment of samples to ranks and micro batches, compared with verl's.")
    parser.add_argument(
        "--peer", type=Path, default=verl.DIRECTORY, help="directory that `benchmarks.packing.verl` has made"
    )
    options = parser.parse_args(argv)
    peer = verl.load(options.peer)
    missing = ["any pipeline: durations of stages are simulated", "waiting times between ranks in a real step"]
    if peer is None:
        missing.append(f"verl: {options.peer} does not contain it; run `python -m benchmarks.packing.verl`")
    elif options.quick:
        missing.append(f"verl on more than {QUICK_PEER} samples: a quick run")
    else:
        missing.append(f"verl with any number of samples on a rank, beyond {MOST_PAIRS:,} samples x ranks: minutes")
    load_kernels()
    rows = first_calls()
    for case in cases():
        is_small = not options.quick or case.samples <= QUICK_PEER
        rows += measure(case, peer if is_small else None, rounds=1 if options.quick else ROUNDS[case.samples])
        write(options.json, rows=rows, not_measured=missing)
        print(*(f"{k}={v:.4g}" if isinstance(v, float) else v for k, v in rows[-1].items()), flush=True)
    write(options.json, rows=rows, goals=goals(rows), not_measured=missing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
