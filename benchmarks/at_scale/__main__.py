"""Steps of 32B and 30B-A3B models on 32, 128 and 512 H100, for every stack: on paper.

`python -m benchmarks.at_scale --json OUT [--shares FILE] [--quick]`. Engines and trainer have the speeds of the
roofline of `megatron-rl plan`; the product's planner, admission and dispatcher place the responses
(`benchmarks.planner`). A step has 512 x 16 answers of 5,600 tokens on average and 20,480 at most. Drafts gain what
the record of `benchmarks.drafting` says. Every stack is simulated in each arrangement of trainer and engines that its
design allows, and goals compare the faster ones. Published steps of other systems stand beside the estimates of the
same steps, so that a reader sees how far the roofline can be trusted.
"""

import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.at_scale import published
from benchmarks.at_scale.jobs import MODELS, Precision
from benchmarks.at_scale.stacks import RHYME, STACKS, SYNCHRONOUS, Case, run
from benchmarks.harness.record import Goal, Row, arguments, write
from launcher.first_hour.shares import Shares, read_shares

NUM_GPUS = (32, 128, 512)
SEEDS = (1, 2, 3)
JUDGED = ("Qwen2.5-32B", 128)
"""Model and number of GPUs of the goals."""
TOLERANCE = 0.25
"""Largest relative difference of an estimate from the published figure."""
NOT_MEASURED = (
    "anything on a GPU: all speeds are estimates",
    "preemption, prefill beside decoding, and the time of rewards",
    "published steps also contain what the estimate lacks: NeMo-RL's refit, its log-probabilities and data work; the "
    "lengths of its answers are known by their mean only",
    "FlashRL's batch and context, on which the gain of 8 bits depends: here keys and values are most of what a "
    "forward reads",
)


def seconds(rows: Sequence[Row], stack: str) -> float:
    """Median step of a stack where the goals are judged, in the faster of its arrangements."""
    model, num_gpus = JUDGED
    steps: dict[str, list[float]] = {}
    for row in rows:
        if (row.get("model"), row.get("gpus"), row.get("stack")) == (model, num_gpus, stack):
            steps.setdefault(str(row["arrangement"]), []).append(float(row["step_s"]))
    return min(map(statistics.median, steps.values()))


def ours(rows: Sequence[Row], precision: Precision) -> float:
    """Median step of the product's fastest stack of a precision with a staleness of at most 1."""
    return min(
        seconds(rows, name)
        for name, stack in STACKS.items()
        if name.startswith("ours") and stack.precision == precision and stack.scheme.max_staleness <= 1
    )


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Ratios of the product's fastest stacks with a staleness of at most 1, and the distance from published figures.

    RhymeRL and the synchronous stack have BF16 engines. A goal in which the product has 8 bits says so.
    """
    best, synchronous = ours(rows, "8 bits"), seconds(rows, SYNCHRONOUS)
    trainer_s = statistics.median(
        float(row["train_all_gpus_s"]) for row in rows if (row.get("model"), row.get("gpus")) == JUDGED
    )
    checks = [float(row["estimated_over_published"]) for row in rows if row["what"] == "published"]
    gain, allowed = synchronous / best, synchronous / trainer_s
    ratios = {
        "ours in 8 bits over synchronous BF16": (gain, 3.5),
        f"over {RHYME}, at equal staleness, both in BF16": (seconds(rows, RHYME) / ours(rows, "BF16"), 1.4),
        f"over {RHYME}, at equal staleness, ours in 8 bits": (seconds(rows, RHYME) / best, 1.4),
    }
    return [
        *(
            Goal(name=name, value=value, bound=bound, direction="at least", unit="times")
            for name, (value, bound) in ratios.items()
        ),
        Goal(
            name="of the gain that the trainer's work allows",
            value=gain / allowed,
            bound=0.5,
            direction="at least",
            unit="share",
        ),
        Goal(
            name="estimate against published figures, largest difference",
            value=max(abs(check - 1.0) for check in checks),
            bound=TOLERANCE,
            direction="at most",
            unit="of the published figure",
        ),
    ]


def cases(*, quick: bool, measured: Shares | None = None) -> list[Case]:
    """Every stack in each of its arrangements, on every cluster."""
    arranged = [(name, arrangement) for name, stack in STACKS.items() for arrangement in stack.arrangements]
    if quick:
        return [
            Case(
                model="Qwen2.5-32B", num_gpus=128, stack=stack, arrangement=arrangement, num_steps=3, measured=measured
            )
            for stack, arrangement in arranged
        ]
    return [
        Case(model=model, num_gpus=num_gpus, stack=stack, arrangement=arrangement, seed=seed, measured=measured)
        for model in MODELS
        for num_gpus in NUM_GPUS
        for stack, arrangement in arranged
        for seed in (SEEDS if (model, num_gpus) == JUDGED else SEEDS[:1])
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate all stacks and write the record with its goals."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--shares", type=Path, metavar="FILE", help="shares.json of `python -m launcher.first_hour`")
    options = parser.parse_args(argv)
    measured = None if options.shares is None else read_shares(options.shares)
    rows: list[Row] = list(published.rows(measured))
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        for row in pool.map(run, cases(quick=options.quick, measured=measured)):
            print(*row.values(), flush=True)
            rows.append(row)
    write(options.json, rows=rows, goals=[] if options.quick else goals(rows), not_measured=NOT_MEASURED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
